"""Which runs each trainer may take, and which it is to hand over: `scheduler.order.homes` on the runs in hand.

No trainer may take a run that moves until the trainer that holds it has forgotten it (`HandedOver`) or is gone. Then
its units are queued again from its saved state, as after the loss of a trainer, so a move changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler.journal.training import Training
from scheduler.order.compose import lanes
from scheduler.order.fair import Only
from scheduler.order.homes import Claim, Homes
from scheduler.order.lanes import RunLane, Unit
from scheduler.order.light_work import cost_of, move_cost

#: Bytes of a parameter's state: weight, two moments and gradient, in float32.
STATE_BYTES = 16


class Residents:
    def __init__(self, training: Training, pass_tokens: int, clock: Callable[[], float]) -> None:
        self._training = training
        self._homes = Homes(pass_tokens, clock)
        self._there: dict[str, bool] = {}  # by trainer: whether it takes runs
        self._moving: dict[str, str] = {}  # by run to be handed over: the trainer that still holds it
        self._in_hand: dict[str, dict[str, int]] = {}  # by run: the operations in trainers' hands, and their tokens
        self.moves = 0

    def offer(self, trainer: str, models: Iterable[str], memory_bytes: int) -> None:
        self._there[trainer] = True
        self._homes.offer(trainer, models, memory_bytes)

    def retire(self, trainer: str) -> None:
        self._there[trainer] = False
        self._homes.retire(trainer)

    def only_of(self, trainer: str) -> Only | None:
        """The runs that this trainer may take: those that live there, and those that would go there now."""
        if len(self._there) == 1 and not self._moving:
            return None
        homes, places = self._homes, self._places()
        return lambda run_id: run_id not in self._moving and (homes.home(run_id) or places.get(run_id)) == trainer

    def _places(self) -> dict[str, str]:
        """The trainers that runs with work but without a home would go to now. Mostly there are no such runs."""
        homes, runs, queue = self._homes, self._training.runs, self._training.queue
        if not any(queue.queued(runs[run_id].path) for run_id in homes.without(runs.keys())):
            return {}
        ready = [path[-1] for model in queue.children() for path in lanes(queue, model)]
        waiting = [runs[run_id] for run_id in ready if run_id in runs and homes.home(run_id) is None]
        return homes.place(list(map(self._claim, waiting)))

    def taken(self, trainer: str, units: Iterable[Unit]) -> None:
        """These units are in the trainer's hands now."""
        for unit in units:
            lane = self._training.runs.get(unit.send.run_id)
            if lane is None:
                continue
            if self._homes.home(lane.run_id) != trainer:
                self._homes.settle(self._claim(lane), trainer)
            ops, op_id = self._in_hand.setdefault(lane.run_id, {}), unit.send.op_id
            ops[op_id] = ops.get(op_id, 0) + cost_of(unit, lane.spec, self._training.sizes(lane.spec))

    def observe(self) -> None:
        """Tell `Homes` how many tokens are outstanding of each run whose queue has changed."""
        changed, self._training.changed = self._training.changed, set()
        for run_id in changed:
            self._outstanding(run_id)

    def over(self, run_id: str, op_id: str) -> None:
        """An operation of a run is in no trainer's hands any more."""
        ops = self._in_hand.get(run_id, {})
        if ops.pop(op_id, None) is None:
            return  # already told, by the operation's answer or at the end of its pass
        if not ops:
            del self._in_hand[run_id]
        self._outstanding(run_id)

    def _outstanding(self, run_id: str) -> None:
        lane = self._training.runs.get(run_id)
        if lane is not None:
            in_hand = sum(self._in_hand.get(run_id, {}).values())
            self._homes.outstanding(run_id, self._training.queue.queued(lane.path) + in_hand)

    def released(self) -> list[tuple[str, str]]:
        """(trainer, run) for each run that has ended and that the trainer may forget."""
        over, self._training.released = self._training.released, []
        found = [(self._holder(run_id), run_id) for run_id in over]
        for run_id in over:
            self._homes.forget(run_id)
        return [(holder, run_id) for holder, run_id in found if holder is not None]

    def even_out(self) -> list[tuple[str, str]]:
        """(trainer, run) for each run that the trainer is to hand over now."""
        at_home = (lane for lane in self._training.runs.values() if self._homes.home(lane.run_id) is not None)
        moves = self._homes.even_out(map(self._claim, at_home))
        self._moving.update((move.run_id, move.source) for move in moves)
        return [(move.source, move.run_id) for move in moves]

    def handed_over(self, run_id: str, *, kept: bool) -> None:
        """The trainer that held the run has forgotten it; with `kept` it could not, and still holds it."""
        source, lane = self._moving.pop(run_id, None), self._training.runs.get(run_id)
        if source is None or lane is None:
            return
        if kept:
            self._homes.settle(self._claim(lane), source)
            return
        self.moves += 1
        self._training.rebuild(lane)

    def gone(self, trainer: str) -> None:
        """Queue the units that rebuild the runs of a trainer that is gone."""
        self._there.pop(trainer, None)
        lost = [lane for lane in self._training.runs.values() if self._holder(lane.run_id) == trainer]
        self._homes.leave(trainer)
        self._moving = {run_id: source for run_id, source in self._moving.items() if source != trainer}
        for lane in lost:
            self._training.rebuild(lane)

    def count(self, trainer: str) -> int:
        """How many runs live on the trainer."""
        return sum(self._holder(run_id) == trainer for run_id in self._training.runs)

    def _holder(self, run_id: str) -> str | None:
        """The trainer that holds the run, even if it is to hand it over."""
        return self._moving.get(run_id) or self._homes.home(run_id)

    def _claim(self, lane: RunLane) -> Claim:
        sizes, spec, holder = self._training.sizes(lane.spec), lane.spec, self._holder(lane.run_id)
        return Claim(
            spec.run_id,
            spec.base_model,
            STATE_BYTES * sizes.adapter if sizes is not None else 0,
            move_cost(spec, sizes),
            fixed=bool(lane.paused) or lane.run_id in self._moving or not self._there.get(holder or ""),
        )
