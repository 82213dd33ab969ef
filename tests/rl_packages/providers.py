"""Our adapters of Modal and Prime, over their published clients, without accounts; nothing leaves this machine. Each
call is bound to the signature of the client's own method before a stand-in answers it, so a call that the client would
not take fails. Requests, answers and errors are the client's own types, and commands run in a shell here. Prints one
line of JSON: the results of a sandbox's contract, by provider."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import modal
import prime_sandboxes
from modal.container_process import ContainerProcess
from modal.io_streams import StreamReader, StreamWriter
from weft.rl import sandboxes

#: The folders that replace a sandbox's /work and /tmp.
HERE = Path(tempfile.gettempdir())
WHEN = "2026-11-23T00:00:00Z"


def stand_in(real: Any, answer: Callable[..., Any], *held: Any) -> Any:
    """A call that takes the arguments of `real`, or of its `aio`, after `held`, and answers."""
    signature = inspect.signature(getattr(real, "aio", real))

    async def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*held, *args, **kwargs).arguments
        found = answer(**{name: value for name, value in given.items() if name != "self"})
        return await found if inspect.isawaitable(found) else found

    if hasattr(real, "aio"):
        call.aio = call  # type: ignore[attr-defined]
    return call


async def shell(line: list[str], given: bytes = b"") -> tuple[int, bytes, bytes]:
    process = await asyncio.create_subprocess_exec(
        *line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=HERE
    )
    out, err = await process.communicate(given)
    return process.returncode or 0, out, err


class Process:
    """Replaces the process that Modal's exec returns; it runs when its stdin is sent."""

    def __init__(self, args: tuple[str, ...], timeout: int, workdir: str, text: bool) -> None:
        assert (text, workdir, type(timeout)) == (False, "/work", int)
        assert hasattr(StreamReader, "__aiter__")
        self.given = b""
        self.stdin = SimpleNamespace(
            write=lambda data: inspect.signature(StreamWriter.write).bind(None, data) and self._keep(data),
            write_eof=lambda: inspect.signature(StreamWriter.write_eof).bind(None),
            drain=stand_in(StreamWriter.drain, lambda: self._run(args), None),
        )
        self.wait = stand_in(ContainerProcess.wait, lambda: self.code, None)

    def _keep(self, data: bytes) -> None:
        self.given += data

    async def _run(self, args: tuple[str, ...]) -> None:
        self.code, out, err = await shell(list(args), self.given)
        self.stdout, self.stderr = _pieces(out), _pieces(err)


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 7):
        yield data[start : start + 7]


class ModalBox:
    """The members of a `modal.Sandbox` that our adapter uses."""

    def __init__(self) -> None:
        own, files = modal.Sandbox, dict[str, bytes]()
        kind = own.filesystem.fget.__annotations__["return"]

        def read(remote_path: str) -> bytes:
            if remote_path not in files:
                raise modal.exception.SandboxFilesystemNotFoundError(remote_path)
            return files[remote_path]

        def write(data: bytes, remote_path: str) -> None:
            if remote_path.endswith("slow"):
                raise modal.exception.TimeoutError
            files[remote_path] = data

        self.exec = stand_in(own.exec, Process, None)
        self.terminate = stand_in(own.terminate, lambda: None, None)
        self.snapshot_filesystem = stand_in(own.snapshot_filesystem, lambda: "an image", None)
        self.filesystem = SimpleNamespace(
            read_bytes=SimpleNamespace(aio=stand_in(kind.read_bytes, read, None)),
            write_bytes=SimpleNamespace(aio=stand_in(kind.write_bytes, write, None)),
        )


def of_modal() -> Any:
    def made(**given: Any) -> ModalBox:
        assert given["block_network"] is True
        assert given["image"] is not None
        return ModalBox()

    modal.App.lookup = stand_in(modal.App.lookup, lambda name, create_if_missing: name)
    modal.Sandbox.create = stand_in(modal.Sandbox.create, made)
    return sandboxes.Modal("weft", most=2)


def of_prime() -> Any:
    """A sandbox of Prime: the client's own `create`, `checkpoint` and `delete`, whose HTTP is answered here."""
    os.environ["PRIME_API_KEY"] = "none"
    home = sandboxes.Prime("python:3.12", most=2)
    client = home.client

    def answered(method: str, endpoint: str, json: Any = None, **_: Any) -> dict[str, Any]:
        common = {"id": "s1", "docker_image": "python:3.12", "created_at": WHEN, "updated_at": WHEN}
        if endpoint.endswith("checkpoints"):
            return {**common, "sandbox_id": "s1", "state": "PENDING", "depth": 0}
        if method == "DELETE":
            return {}
        assert json["network_denylist"] == ["0.0.0.0/0"]
        assert ("checkpoint_id" in json) != ("disk_size_gb" in json)
        sizes = {"disk_size_gb": 1.0, "disk_mount_path": "/", "gpu_count": 0, "status": "PENDING"}
        return {**common, **sizes, **{key: json[key] for key in ("name", "cpu_cores", "memory_gb", "timeout_minutes")}}

    async def executed(sandbox_id: str, command: str, **_: Any) -> Any:
        code, out, err = await shell(["sh", "-c", re.sub(r"/(work|tmp)\b", str(HERE), command)])
        return prime_sandboxes.CommandResponse(stdout=out.decode(), stderr=err.decode(), exit_code=code)

    def uploaded(sandbox_id: str, file_path: str, file_bytes: bytes, filename: str) -> None:
        Path(re.sub(r"^/(work|tmp)\b", str(HERE), file_path)).write_bytes(file_bytes)
        assert filename == Path(file_path).name
        if filename == "slow":
            raise prime_sandboxes.UploadTimeoutError(sandbox_id, file_path, 300)

    client.client.request = stand_in(client.client.request, answered)
    for name, answer in {
        "execute_command": executed,
        "upload_bytes": uploaded,
        "wait_for_creation": lambda sandbox_id: None,
        "wait_for_checkpoint": lambda checkpoint_id: None,
    }.items():
        setattr(client, name, stand_in(getattr(client, name), answer))
    return home


async def contract(home: Any) -> dict[str, Any]:
    """Try what `weft.rl.sandboxes.sandbox` promises of a sandbox, as far as a stand-in can show it."""
    async with sandboxes.opened(home) as box:
        left = (await home.quota()).left
        await box.write("a/answer.txt", b"\x00four")
        read = await box.read("a/answer.txt")
        said = await box.exec("sh", "-c", "cat; echo no >&2; exit 3", stdin=b"given")
        refused = [await _refused(box.read("nowhere")), await _refused(box.write("slow", b""))]
        snapshot = await box.snapshot()
        async with sandboxes.opened(home, snapshot):
            full = (await home.quota()).left
    return {
        "left": [left, full, (await home.quota()).left],
        "read": read.decode(),
        "said": [said.returncode, said.stdout.decode(), said.stderr.decode(), said.limit],
        "refused": refused,
    }


async def _refused(call: Awaitable[Any]) -> str:
    """The first words of its error; empty if it does what was asked."""
    try:
        await call
    except sandboxes.SandboxError as error:
        return str(error).partition(":")[0]
    return ""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, patch.object(sys.modules[__name__], "HERE", Path(folder)):
        providers = {"modal": of_modal, "prime": of_prime}
        print(json.dumps({name: asyncio.run(contract(make())) for name, make in providers.items()}))
