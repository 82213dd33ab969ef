"""The tests. A package, so that `tests/scheduler` is not taken for `scheduler`."""
