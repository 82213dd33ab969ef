"""A sandbox, whoever provides it: a folder `/work`, and commands that run in it.

    async with opened(sandboxes) as box:
        await box.write("solution.py", code)
        done = await box.exec("python3", "solution.py", time_s=5)

`tests/client_sdk/rl/test_sandboxes.py` is the contract, and attacks it from inside.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from weft.errors import WeftError

logger = logging.getLogger("weft")


class SandboxError(WeftError):
    """A sandbox cannot do what it was asked."""


class CannotIsolateError(SandboxError):
    """This machine cannot isolate what runs in a sandbox, so nothing runs."""


#: The folder inside of a sandbox in which commands run.
FOLDER = "/work"
#: The limits that may end a command before its time.
Limit = Literal["time", "memory", "output"]


@dataclass(frozen=True)
class Limits:
    """The limits of a sandbox. A command that exceeds its time, memory or output is ended with all that it has started.

    time_s: of a command, unless `exec` says otherwise.
    cpu_s: processor time of a process.
    memory_bytes: of all processes together, and of each.
    disk_bytes: of all files; they lie in memory. A file can be as large.
    processes: at a time, threads included.
    open_files: of a process.
    output_bytes: of stdout, and of stderr; a file that is read may be as large as all files together.
    """

    time_s: float = 10
    cpu_s: int = 10
    memory_bytes: int = 512 << 20
    disk_bytes: int = 128 << 20
    processes: int = 64
    open_files: int = 256
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True)
class Done:
    """How a command ended. `limit` is what ended it, if a limit did; `returncode` is then negative."""

    returncode: int
    stdout: bytes
    stderr: bytes
    seconds: float
    limit: Limit | None = None

    @property
    def text(self) -> str:
        """The output, as a model may read it."""
        return (self.stdout + self.stderr).decode(errors="replace")


@dataclass(frozen=True)
class Snapshot:
    """The files of a sandbox at one moment, for the same `Sandboxes`."""

    held: Any


@dataclass(frozen=True)
class Quota:
    """How many more sandboxes there may be now, and the reason for that number."""

    left: int
    why: str


class Sandbox(Protocol):
    """One sandbox. What a command has started ends with the command; files stay until `close`."""

    async def exec(self, *command: str, stdin: bytes = b"", time_s: float | None = None) -> Done:
        """Run a command in `/work`. Commands of one sandbox may run side by side."""
        ...

    async def read(self, path: str) -> bytes:
        """The contents of a file. Raises SandboxError if it cannot be read."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, and the folders that it is in. Raises SandboxError if there is no room."""
        ...

    async def snapshot(self) -> Snapshot: ...

    async def close(self) -> None:
        """End everything that runs in it, and delete its files. A second call does nothing."""
        ...


class Sandboxes(Protocol):
    """Makes sandboxes."""

    async def quota(self) -> Quota: ...

    async def create(self, snapshot: Snapshot | None = None) -> Sandbox:
        """A sandbox with the files of `snapshot`, or with none."""
        ...


@asynccontextmanager
async def opened(sandboxes: Sandboxes, snapshot: Snapshot | None = None) -> AsyncIterator[Sandbox]:
    """A sandbox, closed at the end of the block, also after an error. A failure to close it is only logged."""
    box = await sandboxes.create(snapshot)
    try:
        yield box
    finally:
        try:
            await box.close()
        except Exception as error:
            logger.warning(
                "a sandbox was not closed, and goes on until its provider ends it: %s: %s", type(error).__name__, error
            )


async def require(sandboxes: Sandboxes, count: int) -> None:
    """Raise SandboxError, before anything is paid for, unless `count` sandboxes may exist at a time."""
    quota = await sandboxes.quota()
    if quota.left < count:
        raise SandboxError(
            f"up to {count} sandboxes at a time are needed, and there is room for {quota.left} ({quota.why}):"
            " smaller groups, fewer of them under way (concurrency=rl.Concurrency(most=...)), or a larger quota"
        )


def absolute(path: str) -> str:
    """The full path of a file in a sandbox; `path` may be relative to FOLDER."""
    return posixpath.join(FOLDER, path)
