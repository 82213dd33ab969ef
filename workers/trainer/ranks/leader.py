"""Several ranks as one trainer towards the server: rank 0 takes passes, hands each rank its share, and sends the
answers of all. The other ranks follow it.

A run lives on one rank, its home, from its creation on: there lie weights, moments and gradient, there it is stepped,
saved and paged. It is placed where runs take the least memory; what a pass then asks of a rank beyond its fair share,
other ranks compute for it (`spread`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial

import msgspec
import torch

from scheduler.links.messages import HandedOver, Pass, PassOver, SetAside
from workers.model.decoder import Decoder
from workers.trainer.computing import Others
from workers.trainer.ranks.group import Base, Group, Want
from workers.trainer.ranks.guests import Ranks
from workers.trainer.runs.held import Send, Tell
from workers.trainer.runs.residency import Residency
from workers.trainer.trainer import Trainer
from workers.trainer.watchdog import Limit


class Word(Enum):
    """A command of rank 0 to the other ranks, besides passes."""

    BEGIN = "drop what you hold: another server"
    DRAIN = "save what has changed"
    STOP = "leave"


#: Between passes a rank must hear its word at once; one that does not is lost, and the group with it.
HEARS_WITHIN_S = 60.0

#: Makes a trainer for this rank that holds no runs.
MakeTrainer = Callable[[Others], Trainer]


class Member:
    """A rank's part in a trainer, for one server."""

    def __init__(self, group: Group, bases: Mapping[str, Base], device: torch.device, make: MakeTrainer) -> None:
        self.group, self._bases, self._limit_s = group, bases, HEARS_WITHIN_S
        ranks = Ranks(group, device)
        self.trainer = make(ranks)
        ranks.welcome = partial(self.trainer.welcome, send=group.say)
        ranks.relieve = self.trainer.residency.squeeze
        self.trainer.held.give_way = ranks.give_way

    def execute(self, share: Pass) -> None:
        self.group.base, self._limit_s = self._bases.get(share.base_model), share.limit_s or math.inf
        self.trainer.execute(share, self.group.say)

    def drain(self) -> None:
        """Snapshot the runs. It may take as long as the last pass might; what is not saved by then is replayed."""
        with self.trainer.limit(self._limit_s):
            self.trainer.drain(self.group.say)
            self.group.vote(Want.NOTHING)  # messages leave with the vote


class Homes:
    """The home rank of each run: a new run goes where runs take the least memory."""

    def __init__(self, ranks: int) -> None:
        self._of: dict[str, tuple[int, int]] = {}
        self._used_bytes = [0] * ranks

    def of(self, run_id: str) -> int:
        """The home of a run; rank 0 if it has none, which then reports that."""
        return self._of.get(run_id, (0, 0))[0]

    def place(self, run_id: str, size_bytes: int) -> None:
        if run_id not in self._of:
            rank = self._used_bytes.index(min(self._used_bytes))
            self._of[run_id] = rank, size_bytes
            self._used_bytes[rank] += size_bytes

    def forget(self, run_id: str) -> None:
        rank, size_bytes = self._of.pop(run_id, (0, 0))
        self._used_bytes[rank] -= size_bytes


class Leader:
    """The trainers of all ranks, as one, on rank 0. If `send` raises EOFError (the server is gone), it is raised only
    once all ranks have finished what they do: they cannot be left in the middle of it."""

    def __init__(self, member: Member) -> None:
        self._member, self._group = member, member.group
        self._homes = Homes(self._group.size)

    @property
    def models(self) -> Mapping[str, Decoder]:
        return self._member.trainer.models

    @property
    def residency(self) -> Residency:
        """The residency of rank 0; each other rank has one as large."""
        return self._member.trainer.residency

    @property
    def memory_bytes(self) -> int:
        return self.residency.budget_bytes * self._group.size

    def home_of(self, run_id: str) -> int:
        return self._homes.of(run_id)

    def execute(self, pass_: Pass, send: Send) -> None:
        began, overs = time.monotonic(), list[PassOver]()
        shares = self._shares(pass_)
        with self._member.trainer.limit(pass_.limit_s or math.inf):  # a rank may be stuck before it reads its word
            self._group.tell(list(shares))
            self._speaking(send, overs, lambda: self._member.execute(shares[0]))
        seconds = time.monotonic() - began
        send(PassOver(pass_.pass_id, sum(o.tokens for o in overs), sum(o.runs for o in overs), seconds))

    def drain(self, send: Tell) -> None:
        announce(self._group, Word.DRAIN, self._member.trainer.limit)
        self._speaking(send, [], self._member.drain)

    def _speaking(self, send: Tell, overs: list[PassOver], work: Callable[[], None]) -> None:
        """Do `work` while messages of all ranks go to the server, except the ends of their passes."""
        lost: list[EOFError] = []

        def out(message: msgspec.Struct) -> None:
            if isinstance(message, PassOver):
                overs.append(message)
                return
            if isinstance(message, HandedOver | SetAside) and not message.kept:
                self._homes.forget(message.run_id)
            if not lost:
                try:
                    send(message)
                except EOFError as error:
                    lost.append(error)

        self._group.send = out
        work()
        if lost:
            raise lost[0]

    def _shares(self, pass_: Pass) -> list[Pass]:
        for op in pass_.ops:
            if op.spec is not None:
                self._homes.place(op.run_id, self._member.trainer.size_of(op))
        shares = []
        for rank in range(self._group.size):

            def at_home(run_id: str, rank: int = rank) -> bool:
                return self.home_of(run_id) == rank

            shares.append(
                msgspec.structs.replace(
                    pass_,
                    ops=[op for op in pass_.ops if at_home(op.run_id)],
                    release=[run_id for run_id in pass_.release if at_home(run_id)],
                    soon=[run_id for run_id in pass_.soon if at_home(run_id)],
                    hand_over=[run_id for run_id in pass_.hand_over if at_home(run_id)],
                )
            )
        for run_id in pass_.release:
            self._homes.forget(run_id)
        return shares


def announce(group: Group, word: Word, limit: Limit) -> None:
    """On rank 0: tell all ranks a word other than a pass. Returns once all have heard it."""
    with limit(HEARS_WITHIN_S):
        group.tell([word] * group.size)
        group.exchange(None)


def _heard(group: Group) -> Pass | Word:
    word: Pass | Word = group.tell()
    if isinstance(word, Word):
        group.exchange(None)
    return word


def follow(group: Group, begin: Callable[[], Member]) -> None:
    """The loop of every rank but 0, until it is told to stop. `begin` makes its trainer."""
    member: Member | None = None
    while (word := _heard(group)) is not Word.STOP:
        if word is Word.BEGIN:
            if member is not None:
                member.trainer.residency.close()
            member = begin()
            continue
        assert member is not None
        if word is Word.DRAIN:
            member.drain()
        else:
            member.execute(word)
    if member is not None:
        member.trainer.residency.close()
