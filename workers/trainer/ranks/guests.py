"""Parts of operations that are computed away from their run's home, to keep the ranks evenly busy (`spread`).

The home sends the adapter and the operation, the helper computes each part into a gradient of its own that begins with
zero, and sends back what came of it. The home adds gradients and results in the order of the data. A part's gradient
is one sum over its own rows that is added once (`workers.model.lora_products`), so the bits are those of one process.
Where that does not hold a part stays at home: the head adds to its adapter once for each `HEAD_ROWS` rows of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weft.wire.binary.codec import TrainBatch

from scheduler.links.messages import Failure, RunSpec, TrainOp
from workers.model.adapters.adapter import Adapter
from workers.trainer.computing import Bring
from workers.trainer.metrics import Measure
from workers.trainer.progress import Part, Progress
from workers.trainer.ranks.group import Group, Want
from workers.trainer.ranks.spread import Move, Piece, spread
from workers.trainer.runs.arena import Arena, ArenaKind
from workers.trainer.runs.state import RunState

#: The chunk of workers.model.logprobs.
HEAD_ROWS = 1024


@dataclass(frozen=True)
class Order:
    """What a helper is sent before the adapter's weights. `parts` are (start, stop, tokens) in the batch."""

    op: TrainOp
    spec: RunSpec
    kind: ArenaKind
    batch: TrainBatch
    parts: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Outcome:
    """What became of one part; its gradient, if it trains and has not failed, follows by itself."""

    failure: Failure | None
    outputs: list[dict[str, Any]]
    measures: dict[str, Measure]
    experts_LE: Tensor | None


@dataclass
class _Sent:
    """A move as this rank sees it: of its own parts, or of another's as guests."""

    move: Move
    own: list[Part] = field(default_factory=list)
    guests: list[Part] = field(default_factory=list)


class Ranks:
    """The other ranks, as a trainer and its `Computing` see them (`Others`, `Together`)."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: list[_Sent] = []
        #: Has this rank's trainer make a guest ready.
        self.welcome: Callable[[Progress], None] = lambda guest: None

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
        for sent in self._sent:
            move = sent.move
            if move.home == self._group.rank:
                sent.own = by_op[move.op_id][move.first : move.stop]
                self._send(sent, bring)
            elif move.helper == self._group.rank:
                self._receive(sent)
        away = {id(part) for sent in self._sent for part in sent.own}
        guests = [guest for sent in self._sent for guest in sent.guests]
        return [part for part in parts if id(part) not in away] + guests

    def begin(self, trains: bool) -> None:
        self._group.until(Want.TRAIN if trains else Want.FORWARD)

    def end(self, trains: bool) -> None:
        self._group.finish(trains)

    def collect(self, bring: Bring) -> list[Part]:
        if not self._sent:
            return []
        self._group.until(Want.COLLECT)
        for sent in self._sent:
            if sent.own:
                self._add(sent, bring)
            for guest in sent.guests:
                self._give_back(sent.move.home, guest.progress)
        came_back = [part for sent in self._sent for part in sent.own]
        self._sent = []
        return came_back

    def _send(self, sent: _Sent, bring: Bring) -> None:
        progress = sent.own[0].progress
        run, op = progress.run, progress.op
        bring(run)
        ranges = [(part.start, part.stop, part.tokens) for part in sent.own]
        self._group.give(Order(op, run.spec, run.kind, progress.batch, ranges), sent.move.helper)
        dist.send(run.adapter.flat, dst=sent.move.helper)

    def _receive(self, sent: _Sent) -> None:
        order: Order = self._group.take(sent.move.home)
        weights = torch.empty(order.kind.shape.numel, device=self._device)
        dist.recv(weights, src=sent.move.home)
        adapter = Adapter(order.kind.shape, weights, order.kind.scale)
        for start, stop, tokens in order.parts:
            run = RunState(order.spec, order.kind, Arena.of_guest(order.kind, adapter), guest=True)
            guest = Progress(order.op, run, order.batch)
            self.welcome(guest)
            sent.guests.append(Part(guest, start, stop, tokens))

    def _give_back(self, home: int, guest: Progress) -> None:
        self._group.give(Outcome(guest.failure, guest.outputs, guest.measures, guest.experts_LE), home)
        if guest.failure is None and (grad := guest.grad) is not None:
            dist.send(grad.flat, dst=home)

    def _add(self, sent: _Sent, bring: Bring) -> None:
        """What a helper has made of parts of an operation, in their order."""
        progress = sent.own[0].progress
        bring(progress.run)
        for part in sent.own:
            outcome: Outcome = self._group.take(sent.move.helper)
            came: Tensor | None = None
            if outcome.failure is None and progress.trains:
                came = torch.empty(progress.run.kind.shape.numel, device=self._device)
                dist.recv(came, src=sent.move.helper)
            if progress.failure is not None:
                continue
            progress.failure = outcome.failure
            if came is not None and (grad := progress.grad) is not None:
                grad.flat.add_(came)
            if outcome.experts_LE is not None:
                progress.add(part, outcome.outputs, outcome.measures, outcome.experts_LE)


def _piece(part: Part) -> Piece:
    progress = part.progress
    at_once = not (part.trains and progress.run.spec.train_unembed) or part.tokens <= HEAD_ROWS
    movable = at_once and progress.failure is None
    return Piece(progress.op.op_id, part.tokens, part.trains, movable, progress.custom is not None)
