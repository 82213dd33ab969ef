"""Optional packages, imported where they are needed."""

from __future__ import annotations

import importlib
from typing import Any


def imported(name: str, otherwise: str) -> Any:
    """The module `name`. If it is missing, the `ImportError` says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(otherwise) from None
