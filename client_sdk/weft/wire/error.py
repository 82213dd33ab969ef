"""The one error of the wire."""

from __future__ import annotations

__all__ = ["WireError"]


class WireError(ValueError):
    """Bytes or values that the wire cannot carry. The message names the datum, the field, the limit and the value."""
