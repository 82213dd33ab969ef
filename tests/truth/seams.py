"""Blobs and database as one process sees them, with the mishaps of a schedule."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from store.blobs.folder import FolderBlobs
from store.database.db import Database, _answer
from tests.truth.clock import Loop
from tests.truth.schedules import DEATHS, FAULTS, Kind, Mishap, Role, Seams
from tests.truth.strand import Killed

_WRITING = OSError(errno.ENOSPC, "No space left on device")
_READING = OSError(errno.EIO, "Input/output error")


class Life:
    """One process, from its start to its end: `die` ends it, `check` raises if it has ended. `slow` has it wait for so
    many seconds, while others go on."""

    def __init__(
        self, role: Role, seams: dict[Role, Seams], loop: Loop, die: Callable[[], None], slow: Callable[[float], None]
    ) -> None:
        self.alive = True
        self._seams, self._role = seams, role
        self._loop, self._on_death, self._slow = loop, die, slow

    def check(self) -> None:
        if not self.alive:
            raise Killed

    def die(self) -> None:
        if self.alive:
            self.alive = False
            self._on_death()

    def touch(self, kind: str, *more: Kind, by: Role | None = None) -> Kind | None:
        """The process touches something outside, where pauses and `more` may happen to it. Returns what happened; a
        pause is over by then. Raises Killed if the process died."""
        self.check()
        mishap = self._seams[by or self._role].touch(kind, frozenset(more) | {"stands still", "sets clock"})
        if mishap is None:
            return None
        if mishap.kind == "dies before":
            self.die()
            raise Killed
        self._pause(mishap)
        return mishap.kind

    def _pause(self, mishap: Mishap) -> None:
        if mishap.kind == "is slow":
            self._slow(mishap.times)
        elif mishap.kind == "stands still":
            self._loop.jump(mishap.times)
        elif mishap.kind == "sets clock":
            self._loop.ahead_s += mishap.times

    @contextmanager
    def seam(
        self,
        kind: str,
        fault: Exception | None = None,
        cut: Callable[[], None] | None = None,
        *,
        short: bool = False,
    ) -> Iterator[Kind | None]:
        """Within this block the process touches something outside. Raises Killed, or `fault`, or calls `cut`
        afterwards, as the schedule says; gives any other mishap. What can fail can also be slow."""
        can: list[Kind] = [*DEATHS]
        can += [*FAULTS, "is slow"] if fault else []
        can += ["cuts"] if cut else []
        can += ["reads short"] if short else []
        what = self.touch(kind, *can)
        if what == "fails":
            assert fault is not None
            raise fault
        yield what
        if what == "cuts" and cut is not None:
            cut()
        if what == "dies after":
            self.die()
            raise Killed
        if what == "fails after" and fault is not None:
            raise fault


def _cut(file: Path) -> None:
    """Half of the file is lost."""
    os.truncate(file, file.stat().st_size // 2)


class LivingBlobs(FolderBlobs):
    """The blobs of one process."""

    def __init__(self, root: Path, life: Life) -> None:
        self._life = life
        self._short = False  # the next file is short once
        super().__init__(root)

    def put(self, ref: str, data: bytes) -> None:
        with self._life.seam("blob", OSError(*_WRITING.args), lambda: _cut(self.path(ref))):
            super().put(ref, data)

    def get(self, ref: str, sha256: str = "") -> bytes:
        with self._life.seam("blob", OSError(*_READING.args), short=True) as what:
            self._short = what == "reads short"
            return super().get(ref, sha256) if sha256 else super().get(ref)

    def _stored(self, ref: str) -> bytes:
        stored = super()._stored(ref)
        cut, self._short = self._short, False
        return stored[: len(stored) // 2] if cut else stored

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


class _Driver(sqlite3.Connection):
    """Here even statements that SQLAlchemy does not see may fail."""

    fails: Callable[[str, Kind], None] | None = None

    def execute(self, statement: str, *params: Any) -> sqlite3.Cursor:
        if self.fails is not None:
            self.fails(statement, "fails")
        found = super().execute(statement, *params)
        if self.fails is not None:
            self.fails(statement, "fails after")
        return found


class LivingDatabase(Database):
    """The database of one server, written in the loop's own thread: works handed in before the loop's next round are
    one group, as in the real writer. Each statement may fail by itself."""

    def __init__(self, url: str, life: Life, loop: Loop) -> None:
        self._life, self._loop = life, loop
        self._group: list[Any] = []
        self._busy_until_s = 0.0
        super().__init__(url)
        for engine in (self._read_engine, self._write_engine):
            event.listen(engine, "do_connect", lambda *given: given[3].update(factory=_Driver))
            event.listen(engine, "connect", lambda driver, _: setattr(driver, "fails", self._fails))
            event.listen(engine, "before_cursor_execute", self._before)
            event.listen(engine, "after_cursor_execute", self._after)

    def _before(self, _connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        self._fails(statement, "fails")

    def _after(self, _connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        self._fails(statement, "fails after")

    def _fails(self, statement: str, kind: Kind) -> None:
        if self._life.alive and self._life.touch("statement", kind, by="database") == kind:
            raise OperationalError(statement, {}, Exception("disk I/O error"))

    def _submit(self, work: Any) -> None:
        self._life.check()
        _answer([work], self._commit([work]))

    def _gather(self, work: Any, _loop: asyncio.AbstractEventLoop) -> None:
        self._life.check()
        self._group.append(work)
        if len(self._group) == 1:
            self._loop.call_soon(self._write_group)

    def _write_group(self) -> None:
        left_s = self._busy_until_s - self._loop.time()
        if left_s > 0:
            self._loop.call_later(left_s, self._write_group)
            return
        group, self._group = self._group, []
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
        late_s = self._loop.take_late()
        self._busy_until_s = self._loop.time() + late_s
        if late_s:
            self._loop.call_later(late_s, self._answer_if_alive, group, error)
        else:
            _answer(group, error)

    def _answer_if_alive(self, group: list[Any], error: BaseException | None) -> None:
        if self._life.alive:
            _answer(group, error)

    @contextmanager
    def read(self) -> Iterator[Any]:
        with self._life.seam("read", OperationalError("SELECT", {}, Exception("disk I/O error"))):
            pass  # the reader has its session before it touches the disk
        with super().read() as session:
            yield session


__all__ = ["DEATHS", "Life", "LivingBlobs", "LivingDatabase"]
