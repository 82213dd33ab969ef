"""Small sandboxes, and what is left of what ran in them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from weft import rl
from weft.rl.sandboxes.sandbox import Limits, Sandbox, opened

MIB = 1 << 20
SMALL = Limits(time_s=5, cpu_s=2, memory_bytes=128 * MIB, disk_bytes=8 * MIB, processes=24, output_bytes=64 << 10)


def inside(use: Callable[[Sandbox], Awaitable[Any]], limits: Limits = SMALL, **options: Any) -> Any:
    async def go() -> Any:
        async with opened(rl.sandboxes.Local(limits, **options)) as box:
            return await use(box)

    return asyncio.run(go())


def python(code: str, limits: Limits = SMALL, time_s: float | None = None) -> Any:
    """Run code inside, as an attacker would."""
    return inside(lambda box: box.exec("/usr/bin/python3", "-c", code, time_s=time_s), limits)


@contextlib.contextmanager
def marked() -> Iterator[str]:
    """A command line that no other process has; within a second no process of it may be left."""
    mark = f"9{uuid.uuid4().int % 10**12}"
    yield mark
    deadline = time.monotonic() + 1
    while left := [pid for pid in pids() if mark in cmdline(pid)]:
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.02)


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
