"""What the ranks of a trainer do together: they vote for what comes next, make each step at the same time, and have
rank 0 tell the server what they have to say.

The base is sharded (`workers.model.base.sharded`), or its experts are owned by the ranks (`workers.model.owned`): a
forward or backward on one rank needs all of them. Where all ranks map one copy (`workers.model.base.shared`) it needs
none, and the steps are the same. Each rank goes through its own part of a pass; before each step it
votes, and takes part in the others' steps until its own turn:

    forwards first, then forward_backwards; when nobody wants either, those whose work is spread collect it, and then
    the next work is planned; when nobody wants anything, the pass is over.

A rank that is lost leaves the others in a collective that fails or never ends. That ends each of them (the error goes
through to the end of the process, or the watchdog's limit does), for nothing can be computed without it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from workers.model.base.sharded import Sharded
from workers.model.base.shared import Mapped
from workers.model.owned.load import Owned

#: This rank's part of a base.
Base = Sharded | Owned | Mapped

#: Waits without a limit: for the next pass, or a word from rank 0. All others are limited by the watchdog.
FOR_EVER = timedelta(days=365)


class Want(IntEnum):
    """The kind of step that a rank wants next. If ranks want different kinds, the lowest comes first."""

    FORWARD = 1
    TRAIN = 2
    COLLECT = 3
    PLAN = 4
    NOTHING = 5


class Group:
    """This process's place among the ranks. `send` is where messages to the server go on rank 0; elsewhere they wait
    in `said` for the next vote."""

    def __init__(self, control: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.base: Base | None = None  # the base of the pass in progress
        self.send: Callable[[msgspec.Struct], None] = lambda message: None
        self.said: list[msgspec.Struct] = []
        self.control = control

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def say(self, *messages: msgspec.Struct) -> None:
        """Send messages to the server."""
        if not self.leads:
            self.said += messages
            return
        for message in messages:
            self.send(message)

    def vote(self, want: Want) -> Want:
        """Say what this rank wants next, and learn what all do."""
        mine = torch.tensor([want, bool(self.said)])
        votes = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(votes, mine, group=self.control)
        if any(int(vote[1]) for vote in votes):
            self._pass_on()
        return Want(min(int(vote[0]) for vote in votes))

    def until(self, want: Want) -> None:
        """Take part in the others' steps until it is the turn of `want`."""
        while (now := self.vote(want)) is not want:
            self.join(now)

    def join(self, step: Want) -> None:
        """Take part in a step in which this rank has nothing to compute."""
        if step not in (Want.FORWARD, Want.TRAIN):
            raise RuntimeError(f"rank {self.rank} has nothing to do with {step!r}")
        self.finish(step is Want.TRAIN)

    def finish(self, trains: bool) -> None:
        """End a step."""
        assert self.base is not None
        self.base.finish(trains)

    def tell(self, words: list[Any] | None = None) -> Any:
        """Rank 0 sends each rank its word; every rank returns its own."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, words, src=0, group=self.control)
        return mine[0]

    def exchange(self, own: Any) -> list[Any]:
        """Give `own` to all ranks, and return what each has given, by rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self.control)
        return found

    def give(self, what: Any, to: int) -> None:
        dist.send_object_list([what], dst=to, group=self.control)

    def take(self, of: int) -> Any:
        found: list[Any] = [None]
        dist.recv_object_list(found, src=of, group=self.control)
        return found[0]

    def _pass_on(self) -> None:
        """Rank 0 sends what the others had to say."""
        all_said: list[list[msgspec.Struct] | None] | None = [None] * self.size if self.leads else None
        dist.gather_object(self.said, all_said, dst=0, group=self.control)
        self.said.clear()
        for said in all_said or ():
            for message in said or ():
                self.send(message)
