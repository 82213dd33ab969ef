"""A trainer of several ranks in a world: processes over gloo, and what torchrun does for them.

Each life of the trainer is a new set of processes, forked from one that has imported everything. The world is asked
whenever they touch something, and each rank has seams of its own, so that a play is always the same."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from scheduler.links.configs import Basics, TrainerBounds, TrainerConfig
from scheduler.links.messages import PullPass
from scheduler.links.sockets import RECV_BYTES, _Frames, _to_server, frame  # the server's end, which blocks here
from tests.forked import CONTEXT
from tests.truth.rank import Memory, main, said_by
from tests.truth.schedules import RANKS, Kind, Role, Schedule
from tests.truth.seams import Life
from tests.truth.strand import Killed, Strand
from tests.workers.trainer.ranks.meeting import meeting

#: Ranks that have lost their server and have not ended by then are at fault.
LEAVE_WITHIN_S = 60.0

_monotonic = time.monotonic


def real_time() -> AbstractContextManager[Any]:
    """A world replaces `time.monotonic`; multiprocessing waits by the machine's clock."""
    return mock.patch("time.monotonic", _monotonic)


class RankLost(RuntimeError):
    """A rank has ended though nothing has ended it."""


def body(strand: Strand, counts: Counter[str], lives: dict[Role, Life], config: TrainerConfig, memory: Memory) -> None:
    """The trainer's life as a strand, which sends what rank 0 sends. `counts`: of what the ranks touch."""
    group = _Group(counts, lives, config, memory)
    try:
        group.serve(strand)
    finally:
        group.end()


def config_of(
    folder: Path, model: tuple[str, Path], base: Path, bounds: TrainerBounds, pages: str, schedule: Schedule
) -> TrainerConfig:
    """The trainer's config. `base`: the file that the ranks map, if they map the base."""
    where = str(base) if schedule.ranks == "mapped" else ""
    basics = Basics(str(folder), {model[0]: str(model[1])}, device="cpu", dtype="float32", base_dir=where)
    shard = "experts" if schedule.ranks == "experts" else "all"
    return TrainerConfig(basics, bounds, pages, ranks=schedule.rank_count, shard=shard)


class _Group:
    def __init__(self, counts: Counter[str], lives: dict[Role, Life], config: TrainerConfig, memory: Memory) -> None:
        self._folder, self._counts, self._lives = Path(config.basics.data_dir), counts, lives
        self._link, far_link = socket.socketpair()
        self._wires: dict[Connection, Role] = {}
        self._processes: dict[int, Any] = {}  # told by its sentinel
        self._doomed = False  # when one rank is to end, all end
        self._roles = RANKS[: config.ranks]
        with real_time():  # another process could have taken a port that a rank was to listen on
            self._store = meeting()
        for rank, role in enumerate(self._roles):
            ours, theirs = CONTEXT.Pipe()
            link = far_link if rank == 0 else None
            started = CONTEXT.Process(
                target=main, args=(rank, self._store.port, config, memory, theirs, link), daemon=True
            )
            with real_time():
                started.start()
            theirs.close()
            self._wires[ours] = role
            self._processes[started.sentinel] = started
        far_link.close()

    def serve(self, strand: Strand) -> None:
        frames = _Frames(_to_server)
        try:
            while True:
                for ready in wait([self._link, *self._wires, *self._processes]):
                    if ready is self._link:
                        self._heard(strand, frames)
                    elif isinstance(ready, Connection):
                        self._touched(ready)
                    else:
                        self._lost(ready)  # type: ignore[arg-type]
        except EOFError:
            self._leave()
            raise

    def _heard(self, strand: Strand, frames: _Frames) -> None:
        chunk = b""
        with suppress(ConnectionResetError):
            chunk = self._link.recv(RECV_BYTES)
        if not chunk:
            self._link_over()
        frames.add(chunk)
        while (message := frames.take()) is not None:
            strand.send(message)
            if isinstance(message, PullPass):
                self._link.sendall(frame(strand.recv()))

    def _link_over(self) -> None:
        """Rank 0 is ending."""
        for ready in wait(list(self._processes)):
            self._lost(ready)  # type: ignore[arg-type]

    def _touched(self, wire: Connection) -> None:
        role = self._wires[wire]
        try:
            kind, more = wire.recv()
        except (EOFError, ConnectionResetError):
            del self._wires[wire]  # the process's sentinel tells the rest
            return
        self._counts[f"{role}: {kind}"] += 1
        what: Kind | None
        try:
            what = self._lives[role].touch(kind, *more)
        except Killed:
            what = "dies before"
        self._doomed = self._doomed or what in ("dies before", "dies after", "hangs")
        wire.send(what)
        if what == "hangs":  # the others reach their time limit at once
            for other, started in zip(self._roles, self._processes.values(), strict=True):
                if other != role:
                    os.kill(started.pid, signal.SIGALRM)

    def _lost(self, sentinel: int) -> None:
        """A rank has ended: end the others, as torchrun does."""
        if self._doomed:
            raise Killed
        self.end()
        said = [said_by(self._folder, rank).read_text()[-1500:] for rank in range(len(self._roles))]
        with real_time():
            codes = [started.exitcode for started in self._processes.values()]
        raise RankLost(f"ranks ended with {codes}:\n" + "\n---\n".join(said))

    def _leave(self) -> None:
        """The server is gone: the ranks notice, and end."""
        self._link.close()
        while not self._doomed and self._processes:
            with real_time():
                ready = wait([*self._wires, *self._processes], LEAVE_WITHIN_S)
            if not ready:
                raise RankLost(f"ranks that have lost their server do not leave within {LEAVE_WITHIN_S} s")
            for each in ready:
                if isinstance(each, Connection):
                    self._touched(each)
                else:
                    self._processes.pop(each)  # type: ignore[call-overload]

    def end(self) -> None:
        with real_time():
            for started in self._processes.values():
                started.kill()
            for started in self._processes.values():
                started.join()
        self._link.close()
        for wire in self._wires:
            wire.close()
