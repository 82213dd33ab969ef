"""Running a loop's coroutine from code without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def to_end(work: Coroutine[Any, Any, T], instead: str) -> T:
    """The result of `work`, run in an event loop of its own. Raises RuntimeError if a loop already runs, as in a
    notebook."""
    if _running():
        work.close()
        raise RuntimeError(f"an event loop is running here already, as in a notebook: await {instead}(...) instead")
    return asyncio.run(work)


def _running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
