"""Sandboxes at Prime Intellect, by its package `prime-sandboxes` (written against its published signatures; never run:
that needs an account)."""

from __future__ import annotations

import base64
import math
import shlex
import time
import uuid
from typing import Any

from weft.packages import imported
from weft.rl.sandboxes.sandbox import FOLDER, Done, Limits, Quota, SandboxError, Snapshot, absolute

#: All of IPv4: how the client says that there is no network.
_NOWHERE = ["0.0.0.0/0"]
_GIB = 1 << 30


class Prime:
    """`most` is how many sandboxes your account allows: Prime's client does not tell it. `image` is a Docker image;
    after `lifetime_s` a sandbox that nobody closed is ended. The limits of processes and files are Prime's own; those
    of disk and memory hold for the container."""

    def __init__(self, image: str, *, most: int, limits: Limits | None = None, lifetime_s: int = 3600) -> None:
        self._prime = imported("prime_sandboxes", "Prime's sandboxes need its client: pip install prime-sandboxes")
        self.image, self.most, self.lifetime_s = image, most, lifetime_s
        self.limits, self.open = limits or Limits(), 0
        self.client = self._prime.AsyncSandboxClient()

    async def quota(self) -> Quota:
        return Quota(self.most - self.open, f"most={self.most}, {self.open} are open")

    async def create(self, snapshot: Snapshot | None = None) -> PrimeSandbox:
        start: dict[str, Any] = {"checkpoint_id": snapshot.held} if snapshot else {"docker_image": self.image}
        if snapshot is None:
            start["disk_size_gb"] = float(math.ceil(self.limits.disk_bytes / _GIB))
        asked = self._prime.CreateSandboxRequest(
            name=f"weft-{uuid.uuid4().hex[:12]}",
            memory_gb=float(math.ceil(self.limits.memory_bytes / _GIB)),
            timeout_minutes=math.ceil(self.lifetime_s / 60),
            network_denylist=_NOWHERE,
            labels=["weft"],
            **start,
        )
        box = PrimeSandbox(self, (await self.client.create(asked)).id)
        self.open += 1
        try:
            await self.client.wait_for_creation(box.id)
            await self.client.execute_command(box.id, f"mkdir -p {FOLDER}")
        except BaseException:
            await box.close()
            raise
        return box


class PrimeSandbox:
    """One sandbox of `Prime`."""

    def __init__(self, provider: Prime, id: str) -> None:
        self._provider, self.id, self._closed = provider, id, False

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        """The errors that the client raises if a file cannot be moved; they have no common base."""
        prime = self._provider._prime
        return (prime.APIError, prime.CommandTimeoutError, prime.UploadTimeoutError, prime.SandboxNotRunningError)

    async def exec(self, *command: str, stdin: bytes = b"", time_s: float | None = None) -> Done:
        limits, began = self._provider.limits, time.monotonic()
        given = math.ceil(limits.time_s if time_s is None else time_s)
        line = shlex.join(command)
        if stdin:
            given_by = f"/tmp/.stdin-{uuid.uuid4().hex}"
            await self.write(given_by, stdin)
            line = f"{{ rm -f {given_by}; {line}; }} < {given_by}"
        try:
            said = await self._provider.client.execute_command(self.id, line, working_dir=FOLDER, timeout=given)
        except self._provider._prime.CommandTimeoutError:
            return Done(-9, b"", b"", time.monotonic() - began, "time")
        out, err = said.stdout.encode(), said.stderr.encode()
        if max(len(out), len(err)) > limits.output_bytes:
            most = limits.output_bytes
            return Done(-9, out[:most], err[:most], time.monotonic() - began, "output")
        return Done(said.exit_code, out, err, time.monotonic() - began)

    async def read(self, path: str) -> bytes:
        line = f"base64 -w0 -- {shlex.quote(absolute(path))}"
        try:
            said = await self._provider.client.execute_command(self.id, line)
        except self._errors as error:
            raise SandboxError(f"cannot read {path}: {error}") from error
        if said.exit_code != 0:
            raise SandboxError(f"cannot read {path}: {said.stderr.strip()[-400:]}")
        return base64.b64decode(said.stdout)

    async def write(self, path: str, data: bytes) -> None:
        whole = absolute(path)
        try:
            await self._provider.client.execute_command(self.id, f"mkdir -p -- {shlex.quote(whole.rpartition('/')[0])}")
            await self._provider.client.upload_bytes(self.id, whole, data, whole.rpartition("/")[2])
        except self._errors as error:
            raise SandboxError(f"cannot write {path}: {error}") from error

    async def snapshot(self) -> Snapshot:
        made = await self._provider.client.checkpoint(self.id)
        await self._provider.client.wait_for_checkpoint(made.id)
        return Snapshot(made.id)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._provider.open -= 1
            await self._provider.client.delete(self.id)
