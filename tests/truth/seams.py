"""Blobs and database as one process sees them, with what a schedule has befall it there."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError

from store.blobs import Blobs
from store.db import Database, _answer, _Blocked
from tests.truth.schedules import DEATHS, Seams
from tests.truth.strand import Killed

_WRITING = OSError(errno.ENOSPC, "No space left on device")
_READING = OSError(errno.EIO, "Input/output error")


class Life:
    """One process, from its start to its end: `die` is what ends it, `check` raises when it has ended."""

    def __init__(self, seams: Seams, on_death: Callable[[], None]) -> None:
        self.alive = True
        self.seams = seams
        self._on_death = on_death

    def check(self) -> None:
        if not self.alive:
            raise Killed

    def die(self) -> None:
        if self.alive:
            self.alive = False
            self._on_death()

    @contextmanager
    def seam(self, kind: str, fault: Exception | None = None, cut: Callable[[], None] | None = None) -> Iterator[None]:
        """Something outside is touched in this block. Raises Killed, or `fault`, or does `cut` afterwards, where the
        schedule says so."""
        self.check()
        what = self.seams.touch(kind, can_fail=fault is not None, can_cut=cut is not None)
        if what == "dies before":
            self.die()
            raise Killed
        if what == "fails":
            assert fault is not None
            raise fault
        yield
        if what == "cuts" and cut is not None:
            cut()
        if what == "dies after":
            self.die()
            raise Killed
        if what == "fails after" and fault is not None:
            raise fault


def _cut(file: Path) -> None:
    """Half of it is lost."""
    os.truncate(file, file.stat().st_size // 2)


class LivingBlobs(Blobs):
    """The blobs of one process."""

    def __init__(self, root: Path, life: Life) -> None:
        self._life = life
        super().__init__(root)

    def put(self, ref: str, data: bytes) -> None:
        with self._life.seam("blob", OSError(*_WRITING.args), lambda: _cut(self.path(ref))):
            super().put(ref, data)

    def get(self, ref: str, sha256: str = "") -> bytes:
        with self._life.seam("blob", OSError(*_READING.args)):
            return super().get(ref, sha256) if sha256 else super().get(ref)

    def delete(self, ref: str) -> None:
        with self._life.seam("blob"):
            super().delete(ref)

    def delete_tree(self, ref: str) -> None:
        with self._life.seam("blob"):
            super().delete_tree(ref)

    @contextmanager
    def new_folder(self, ref: str) -> Iterator[Path]:
        fault, cut = OSError(*_WRITING.args), lambda: _cut(max(self.path(ref).glob("*.safetensors")))
        with self._life.seam("blob", fault, cut), super().new_folder(ref) as folder:
            yield folder


class LivingDatabase(Database):
    """The database of one server, written in the loop's own thread: works that are handed in before the loop comes
    round again are one group, as in the real writer."""

    def __init__(self, url: str, life: Life, loop: asyncio.AbstractEventLoop) -> None:
        self._life, self._loop = life, loop
        self._gathered: list[Any] = []
        super().__init__(url)

    def _submit(self, work: Any) -> None:
        self._life.check()
        if isinstance(work.waiting, _Blocked):
            _answer([work], self._commit([work]))
            return
        self._gathered.append(work)
        if len(self._gathered) == 1:
            self._loop.call_soon(self._write_gathered)

    def _write_gathered(self) -> None:
        group, self._gathered = self._gathered, []
        if not self._life.alive or not group:
            return
        error: BaseException | None = None
        try:
            with self._life.seam("commit", OperationalError("COMMIT", {}, Exception("disk I/O error"))):
                error = self._commit(group)
        except Killed:
            return
        except OperationalError as fault:
            error = fault
        _answer(group, error)

    @contextmanager
    def read(self) -> Iterator[Any]:
        with self._life.seam("read", OperationalError("SELECT", {}, Exception("disk I/O error"))):
            pass  # who reads has the session before it touches the disk
        with super().read() as session:
            yield session


__all__ = ["DEATHS", "Life", "LivingBlobs", "LivingDatabase"]
