"""Replaces `workers.model.base.cuda_memory` by files, for a holder of weights without a GPU. Each `room` is a file in
the folder HOLDER_TEST. Files there steer it: with `die` the next room kills the process, with `full` it finds no
memory; with `closed` no room can be opened, with `unshared` none can be shared."""

from __future__ import annotations

import mmap
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_paths: dict[int, str] = {}


def identity(device: torch.device) -> str:
    return str(device)


def environment() -> dict[str, str]:
    return dict(os.environ)


def room(size_bytes: int, device: torch.device) -> Tensor:
    folder = Path(os.environ["HOLDER_TEST"])
    if (folder / "die").exists():
        (folder / "die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if (folder / "full").exists():
        (folder / "full").unlink()
        raise torch.OutOfMemoryError("others have it")
    descriptor, path = tempfile.mkstemp(dir=folder, prefix="room-")
    os.ftruncate(descriptor, size_bytes)
    whole = torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
    _paths[whole.data_ptr()] = path
    return whole


def handle(whole: Tensor) -> list[Any]:
    if Path(os.environ["HOLDER_TEST"], "unshared").exists():
        raise RuntimeError("no more handles")
    return [_paths[whole.data_ptr()]]


def opened(found: list[Any], device: torch.device) -> Tensor:
    if (Path(found[0]).parent / "closed").exists():
        raise RuntimeError("invalid device context")
    with open(found[0], "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
