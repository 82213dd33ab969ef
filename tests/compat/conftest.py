"""The end-to-end tests' server."""

from tests.e2e.conftest import weftd

__all__ = ["weftd"]
