"""Sandboxes at Modal, by its package `modal` (written against 1.6.4's signatures; never run: that needs an account)."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from weft.packages import imported
from weft.rl.sandboxes.sandbox import FOLDER, Done, Limits, Quota, SandboxError, Snapshot, absolute


class Modal:
    """`most` is how many sandboxes your account allows: Modal's client does not tell it. `app` is the name of a Modal
    app, `image` a `modal.Image` (None: its Debian); after `lifetime_s` a sandbox that nobody closed is ended. The
    limits of disk, processes and files are Modal's own, and `memory_bytes` holds for the container."""

    def __init__(
        self, app: str, *, most: int, image: Any = None, limits: Limits | None = None, lifetime_s: int = 3600
    ) -> None:
        self._modal = imported("modal", "Modal's sandboxes need its client: pip install modal")
        self.app, self.most, self.image, self.lifetime_s = app, most, image, lifetime_s
        self.limits, self.open = limits or Limits(), 0

    async def quota(self) -> Quota:
        return Quota(self.most - self.open, f"most={self.most}, {self.open} are open")

    async def create(self, snapshot: Snapshot | None = None) -> ModalSandbox:
        image = snapshot.held if snapshot else self.image
        box = await self._modal.Sandbox.create.aio(
            app=await self._modal.App.lookup.aio(self.app, create_if_missing=True),
            image=image or self._modal.Image.debian_slim(),
            timeout=self.lifetime_s,
            workdir=FOLDER,
            memory=(self.limits.memory_bytes >> 20, self.limits.memory_bytes >> 20),
            block_network=True,
        )
        self.open += 1
        return ModalSandbox(self, box)


class ModalSandbox:
    """One sandbox of `Modal`."""

    def __init__(self, provider: Modal, box: Any) -> None:
        self._provider, self._box, self._closed = provider, box, False

    async def exec(self, *command: str, stdin: bytes = b"", time_s: float | None = None) -> Done:
        limits, began = self._provider.limits, time.monotonic()
        given = math.ceil(limits.time_s if time_s is None else time_s)
        process = await self._box.exec.aio(*command, timeout=given, workdir=FOLDER, text=False)
        process.stdin.write(stdin)
        process.stdin.write_eof()
        await process.stdin.drain.aio()
        (out, more), (err, most) = await asyncio.gather(
            *(_taken(stream, limits.output_bytes) for stream in (process.stdout, process.stderr))
        )
        if more or most:  # Modal cannot end a single command: it runs until its time is over, and nobody reads it
            return Done(-9, out, err, time.monotonic() - began, "output")
        code, seconds = await process.wait.aio(), time.monotonic() - began
        return Done(code, out, err, seconds, "time" if code == -1 else None)

    async def read(self, path: str) -> bytes:
        try:
            return bytes(await self._box.filesystem.read_bytes.aio(absolute(path)))
        except self._provider._modal.exception.Error as error:
            raise SandboxError(f"cannot read {path}: {error}") from error

    async def write(self, path: str, data: bytes) -> None:
        try:
            await self._box.filesystem.write_bytes.aio(data, absolute(path))
        except self._provider._modal.exception.Error as error:
            raise SandboxError(f"cannot write {path}: {error}") from error

    async def snapshot(self) -> Snapshot:
        return Snapshot(await self._box.snapshot_filesystem.aio())

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._provider.open -= 1
            await self._box.terminate.aio()


async def _taken(stream: Any, most: int) -> tuple[bytes, bool]:
    """The first `most` bytes, and whether more came."""
    kept = b""
    async for piece in stream:
        kept += piece
        if len(kept) > most:
            return kept[:most], True
    return kept, False
