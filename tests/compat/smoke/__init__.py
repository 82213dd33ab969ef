"""A tour of everything that one version of the official SDK can ask of a server.

Runs inside that version's own environment (`python -m smoke`, from `tests/compat`), imports nothing of ours, and writes
what came of each call as JSON: `ok`, `fail` with the reason, or `absent` where the version does not have the call.
"""
