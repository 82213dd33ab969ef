"""The official SDK, version by version: `tour` runs `smoke` in an environment of each."""
