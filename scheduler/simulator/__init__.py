"""The scheduler on a virtual clock: `weftd simulate`, docs/scheduling.md."""
