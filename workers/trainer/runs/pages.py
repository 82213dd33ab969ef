"""Run states that are paged out of the computing memory: in the host's memory first, then on disk.

The host's memory is a tier only for a trainer on a device; a trainer on the CPU pages to disk directly. Page files are
worth nothing after their process: a lost trainer is rebuilt from the journal. So they are never flushed to the disk,
and files found in the folder at the start may be deleted. A trainer without a data folder of its own has a temporary
one (`workers.scratch`).
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_names = itertools.count()


class PageError(RuntimeError):
    """A page cannot be read back: the run is lost with this trainer, and the journal rebuilds it on the next."""


class PageStore:
    """Pages by the id of their run; a page is a list of flat float32 tensors. At most `host_bytes` stay in memory, the
    least recently used go to files in `folder`, which is made when needed. Not thread safe: for the pager's thread."""

    def __init__(self, folder: Path, host_bytes: int = 0) -> None:
        self._folder, self._host_bytes = folder, host_bytes
        self._host: OrderedDict[str, list[Tensor]] = OrderedDict()
        self._files: dict[str, Path] = {}
        self.in_host_bytes = 0

    def put(self, run_id: str, pieces: Sequence[Tensor]) -> None:
        """Keep a copy, in place of the run's older page. OSError leaves that one as it was, if it was in a file."""
        size_bytes = sum(piece.nbytes for piece in pieces)
        if size_bytes <= self._host_bytes:
            self.drop(run_id)
            self._host[run_id] = [_host_copy(piece) for piece in pieces]
            self.in_host_bytes += size_bytes
            self._spill()
            return
        self._write(run_id, pieces)
        self._forget_host(run_id)

    def get(self, run_id: str, pieces: Sequence[Tensor]) -> None:
        """Fill `pieces`, of the sizes that were put, with the page; the page stays."""
        kept = self._host.get(run_id)
        if kept is not None:
            self._host.move_to_end(run_id)
            for piece, copy in zip(pieces, kept, strict=True):
                piece.copy_(copy, non_blocking=True)
            return
        try:
            _read_file(self._files[run_id], pieces)
        except (KeyError, OSError) as error:
            raise PageError(f"the page of run {run_id} cannot be read: {error!r}") from error

    def drop(self, run_id: str) -> None:
        """Forget the run's page, if there is one."""
        self._forget_host(run_id)
        file = self._files.pop(run_id, None)
        if file is not None:
            with suppress(OSError):
                file.unlink()

    def clear(self) -> None:
        """Forget everything."""
        for run_id in [*self._host, *self._files]:
            self.drop(run_id)

    def _forget_host(self, run_id: str) -> None:
        self.in_host_bytes -= sum(copy.nbytes for copy in self._host.pop(run_id, ()))

    def _spill(self) -> None:
        while self.in_host_bytes > self._host_bytes:
            run_id = next(iter(self._host))
            self._write(run_id, self._host[run_id])
            self._forget_host(run_id)

    def _write(self, run_id: str, pieces: Sequence[Tensor]) -> None:
        """Write beside the older file, then replace it: a full disk loses no page."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{os.getpid()}-{next(_names)}.page"
        try:
            _write_file(file, pieces)
        except OSError:
            file.unlink(missing_ok=True)
            raise
        older = self._files.get(run_id)
        self._files[run_id] = file
        if older is not None:
            older.unlink(missing_ok=True)


def _host_copy(piece: Tensor) -> Tensor:
    copy = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.is_cuda)
    return copy.copy_(piece)


def _write_file(file: Path, pieces: Sequence[Tensor]) -> None:
    with file.open("wb", buffering=0) as out:
        for piece in pieces:
            rest = _memory(piece.cpu())
            while rest:
                rest = rest[out.write(rest) :]


def _read_file(file: Path, pieces: Sequence[Tensor]) -> None:
    with file.open("rb", buffering=0) as source:
        for piece in pieces:
            whole = piece if piece.device.type == "cpu" else torch.empty(piece.shape, dtype=piece.dtype)
            rest = _memory(whole)
            while rest:
                count = source.readinto(rest)
                if not count:
                    raise OSError(f"{file.name} ends early")
                rest = rest[count:]
            if whole is not piece:
                piece.copy_(whole)


def _memory(flat: Tensor) -> memoryview[Any]:
    array: Any = flat.numpy()
    return memoryview(array).cast("B")
