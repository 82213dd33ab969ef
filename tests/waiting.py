"""Waiting for what no event tells: tests look again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(holds: Callable[[], Found], within_s: float = 60.0, said: Callable[[], object] = str) -> Found:
    """Look until it holds, and return what was found; a test that waits longer fails with what is `said`."""
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < deadline, said()
        time.sleep(0.01)
    return found


async def until_async(holds: Callable[[], object], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
