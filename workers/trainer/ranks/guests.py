"""Parts of operations that are computed away from their run's home, to keep the ranks evenly busy (`spread`).

The home sends the adapter and the operation, the helper computes each part into a gradient of its own that begins with
zero, and sends back what came of it. The home adds gradients and results in the order of the data. A part's gradient is
one sum over its own rows that is added once (`workers.model.lora.products`), so the bits are those of one process. If a
helper lacks memory for a part, beside its own runs, it and the operation's later parts come back: the home computes
them itself. A part whose gradient is not one such sum stays at home: the head adds to its adapter once for each
`HEAD_ROWS` rows of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weft.wire.binary.train_codec import TrainBatch

from scheduler.links.messages import Failure, RunSpec, TrainOp
from workers.model.adapters.adapter import Adapter
from workers.model.memory import with_room
from workers.trainer.computing import Bring, Ready
from workers.trainer.metrics import Measure
from workers.trainer.progress import Part, Progress
from workers.trainer.ranks.group import Group, Want
from workers.trainer.ranks.spread import Move, Piece, spread
from workers.trainer.runs.arena import Arena, ArenaKind
from workers.trainer.runs.state import RunState

#: The chunk size of workers.model.logprobs.
HEAD_ROWS = 1024
#: How many numbers of a gradient travel at a time: the home then needs no memory for a second whole gradient.
AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Order:
    """The message to a helper before the adapter's weights. `parts` are (start, stop, tokens) in the batch."""

    op: TrainOp
    spec: RunSpec
    kind: ArenaKind
    batch: TrainBatch
    parts: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Outcome:
    """The result of one part; its gradient follows separately, if it trains and has not failed."""

    failure: Failure | None
    outputs: list[dict[str, Any]]
    measures: dict[str, Measure]
    experts_LE: Tensor | None


@dataclass
class _Sent:
    """A move as one rank sees it: with its own parts, of which the helper has taken `taken`; or with another rank's
    parts as `guests`."""

    move: Move
    own: list[Part] = field(default_factory=list)
    taken: int = 0
    guests: list[Part] = field(default_factory=list)


class Ranks:
    """The other ranks, as a trainer and its `Computing` see them (`Others`, `Together`)."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: list[_Sent] = []
        #: Makes a guest ready on this rank's trainer.
        self.welcome: Callable[[Progress], None] = lambda guest: None
        #: Frees memory of this rank's runs.
        self.relieve: Callable[[], None] = lambda: None

    def wait(self) -> None:
        self._group.until(Want.PLAN)

    def attend(self, work: Callable[[], object]) -> None:
        while (now := self._group.vote(Want.NOTHING)) is not Want.NOTHING:
            if now is Want.PLAN:
                work()
            else:
                self._group.join(now)

    def share(self, parts: Sequence[Part], bring: Bring) -> list[Part]:
        by_op: dict[str, list[Part]] = {}
        for part in parts:
            by_op.setdefault(part.progress.op.op_id, []).append(part)
        everyone = self._group.exchange([_piece(part) for own in by_op.values() for part in own])
        self._sent = [_Sent(move) for move in spread(everyone)]
        refused: set[str] = set()  # operations that are not sent completely: their later parts stay here, too
        for sent in self._sent:
            move = sent.move
            if move.home == self._group.rank:
                sent.own = by_op[move.op_id][move.first : move.stop]
                if not self._send(sent, bring, wanted=move.op_id not in refused):
                    refused.add(move.op_id)
            elif move.helper == self._group.rank:
                self._receive(sent)
        away = {id(part) for sent in self._sent for part in sent.own}
        guests = [guest for sent in self._sent for guest in sent.guests]
        return [part for part in parts if id(part) not in away] + guests

    def begin(self, trains: bool) -> None:
        self._group.until(Want.TRAIN if trains else Want.FORWARD)

    def end(self, trains: bool) -> None:
        self._group.finish(trains)

    def collect(self, ready: Ready) -> tuple[list[Part], list[Part]]:
        if not self._sent:
            return [], []
        self._group.until(Want.COLLECT)
        came: list[Part] = []
        back: list[Part] = []
        for sent in self._sent:
            if sent.own:
                behind = any(part.progress is sent.own[0].progress for part in back)
                taken = self._add(sent, ready, wanted=not behind)
                came += sent.own[:taken]
                back += sent.own[taken:]
            if sent.guests:
                self._give_back(sent)
                for guest in sent.guests:
                    guest.progress.run.arena = None  # in case somebody still refers to the guest
        self._sent = []
        return came, back

    def give_way(self) -> bool:
        here = [part.progress for sent in self._sent for part in sent.guests if part.progress.run.arena is not None]
        for guest in here:
            guest.unfit = True
            guest.fail("its rank is to compute it")
            guest.run.arena = None
        return bool(here)

    def _send(self, sent: _Sent, bring: Bring, wanted: bool) -> bool:
        """Send a move to its helper. Returns whether the helper has taken all of it. The helper is also told if nothing
        comes."""
        progress = sent.own[0].progress
        run, op, helper = progress.run, progress.op, sent.move.helper
        order: Order | None = None
        with suppress(OSError):
            if wanted:
                bring(run)
                ranges = [(part.start, part.stop, part.tokens) for part in sent.own]
                order = Order(op, run.spec, run.kind, progress.batch, ranges)
        self._group.give(order, helper)
        if order is None:
            return False
        sent.taken = self._group.take(helper)
        if sent.taken:
            dist.send(run.adapter.flat, dst=helper)
        return sent.taken == len(sent.own)

    def _receive(self, sent: _Sent) -> None:
        home = sent.move.home
        order: Order | None = self._group.take(home)
        if order is None:
            return
        weights = self._take_in(sent, order)
        self._group.give(len(sent.guests), home)
        if sent.guests:
            dist.recv(weights, src=home)

    def _take_in(self, sent: _Sent, order: Order) -> Tensor:
        """Make guests of as many parts as there is memory for. Returns the tensor for their weights."""
        kind, weights = order.kind, torch.empty(0)
        with suppress(OSError):
            weights = with_room(lambda: torch.empty(kind.shape.numel, device=self._device), self.relieve)
            adapter = Adapter(kind.shape, weights, kind.scale)
            for start, stop, tokens in order.parts:
                guest = Progress(order.op, RunState(order.spec, kind, None, guest=True), order.batch)
                make = partial(Arena.of_guest, kind, adapter, trains=guest.trains)
                guest.run.arena = with_room(make, self.relieve)
                self.welcome(guest)
                sent.guests.append(Part(guest, start, stop, tokens))
        return weights

    def _give_back(self, sent: _Sent) -> None:
        """Send the results of guests, up to the first that there was no memory for, if the home wants them."""
        if not self._group.take(sent.move.home):
            return
        done = [part.progress for part in takewhile(lambda part: not part.progress.unfit, sent.guests)]
        outcomes = [Outcome(guest.failure, guest.outputs, guest.measures, guest.experts_LE) for guest in done]
        self._group.give(outcomes, sent.move.home)
        for guest in done:
            if guest.failure is None and (grad := guest.grad) is not None:
                for piece in torch.split(grad.flat, AT_ONCE):
                    dist.send(piece, dst=sent.move.home)

    def _add(self, sent: _Sent, ready: Ready, wanted: bool) -> int:
        """Add a helper's results for parts of an operation, in order. Returns how many."""
        progress, helper = sent.own[0].progress, sent.move.helper
        if not sent.taken:
            return 0
        wanted = wanted and progress.failure is None and ready(progress)
        buffer = self._buffer(progress) if wanted else None
        self._group.give(buffer is not None, helper)
        if buffer is None:
            return 0
        outcomes: list[Outcome] = self._group.take(helper)
        for part, outcome in zip(sent.own, outcomes, strict=False):
            if outcome.failure is None and (grad := progress.grad) is not None:
                for piece in torch.split(grad.flat, AT_ONCE):
                    came = buffer[: len(piece)]
                    dist.recv(came, src=helper)
                    if progress.failure is None:
                        piece.add_(came)
            if progress.failure is None:
                progress.failure = outcome.failure
                if outcome.experts_LE is not None:
                    progress.add(part, outcome.outputs, outcome.measures, outcome.experts_LE)
        return len(outcomes)

    def _buffer(self, progress: Progress) -> Tensor | None:
        """A buffer for pieces of a gradient; None if there is no memory."""
        size = min(AT_ONCE, progress.run.kind.shape.numel) if progress.trains else 0
        with suppress(OSError):
            return with_room(lambda: torch.empty(size, device=self._device), self.relieve)
        return None


def _piece(part: Part) -> Piece:
    progress = part.progress
    at_once = not (part.trains and progress.run.spec.train_unembed) or part.tokens <= HEAD_ROWS
    movable = at_once and progress.failure is None
    return Piece(progress.op.op_id, part.tokens, part.trains, movable, progress.custom is not None)
