"""One rank of a world's trainer: the real process (`workers.trainer.ranks.process`), forked by `ranks`. Before it
touches a blob or another rank it asks its world, which may have it die or hang there."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scheduler.links.configs import TrainerConfig
from tests.truth.memory import few_guests, little_memory
from tests.truth.schedules import DEATHS, Kind, Role
from tests.truth.seams import Life, LivingBlobs
from tests.workers.trainer.allocations import short_steps
from tests.workers.trainer.ranks.meeting import place
from workers.leave import leave
from workers.trainer.ranks import process
from workers.trainer.ranks.group import Group

#: A rank may be lost at these calls of `Group`, among other places.
CALLS = ("vote", "give", "take", "exchange")


@dataclass(frozen=True)
class Memory:
    """The memory of a machine: `Schedule.most_tokens`, bytes for the states of runs, `Schedule.guests` and `steps`."""

    most_tokens: int
    states_bytes: int
    guests: int
    steps: int


class FarLife(Life):
    """A life whose seams are counted by the world, in another process."""

    def __init__(self, wire: Connection) -> None:
        self.alive = True
        self._wire = wire

    def touch(self, kind: str, *more: Kind, by: Role | None = None) -> Kind | None:
        self._wire.send((kind, more))
        what: Kind | None = self._wire.recv()
        if what == "dies before":
            self.die()
        if what == "hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
        return what

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main(
    rank: int, port: int, config: TrainerConfig, memory: Memory, wire: Connection, link: socket.socket | None
) -> None:
    os.environ.update(place(rank, config.ranks, port), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(config.ranks))
    said = os.open(said_by(Path(config.basics.data_dir), rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    life = FarLife(wire)
    blobs = LivingBlobs(Path(config.basics.data_dir) / "blobs", life)
    with ExitStack() as stack:
        for call in CALLS:
            stack.enter_context(patch.object(Group, call, _seam(life, call, getattr(Group, call))))
        stack.enter_context(patch.object(process, "handed", lambda door: (config, link.detach() if link else None)))
        stack.enter_context(patch.object(process, "blobs_of", lambda basics: blobs))
        stack.enter_context(few_guests(memory.guests))
        stack.enter_context(short_steps(memory.steps))
        stack.enter_context(little_memory(memory.most_tokens, memory.states_bytes))
        leave(process.main("", os.getppid()))


def said_by(folder: Path, rank: int) -> Path:
    """The file of a rank's output, standard error included."""
    return folder / f"rank{rank}.txt"


def _seam(life: FarLife, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def touched(self: Group, *args: Any) -> Any:
        what = life.touch(kind, *DEATHS, "hangs")
        found = call(self, *args)
        if what == "dies after":
            life.die()
        return found

    return touched
