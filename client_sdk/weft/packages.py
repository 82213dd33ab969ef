"""Packages that not everybody has, imported where something needs them."""

from __future__ import annotations

import importlib
from typing import Any


def imported(name: str, otherwise: str) -> Any:
    """The module of this name; `ImportError` that says what to do."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(otherwise) from None
