"""Where trainers come for work, between the journal's queue and their links.

Trainers pull: the desk sends a pass as soon as a trainer has asked for one and there is work that it may take. A run
lives on one trainer (`scheduler.dispatch.residents`); passes of several are in flight at once. If a trainer's link
closes, the units in its hands go back to the queue and are suspected (`scheduler.dispatch.lost_work`), unless the
trainer had announced that it leaves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from scheduler.dispatch.lost_work import suspect
from scheduler.dispatch.overdue import Overdue
from scheduler.dispatch.residents import Residents
from scheduler.journal.training import Training
from scheduler.links.messages import (
    Done,
    Drain,
    HandedOver,
    InLoss,
    Leaving,
    Pass,
    PassOver,
    PolicyMoved,
    PullPass,
    SetAside,
    Snapshot,
)
from scheduler.links.sockets import Link
from scheduler.order.compose import compose, upcoming
from scheduler.order.lanes import Unit
from scheduler.order.operations import Operation
from scheduler.order.presence import LoadingFor, Presence, Present, nobody_loads
from scheduler.order.timings import Stretch

log = logging.getLogger(__name__)

_COUNTS = {"passes": 0, "shared_passes": 0, "tokens": 0, "busy_s": 0.0}


@dataclass(eq=False)
class _Trainer:
    """One trainer, from the opening of its link until its runs are queued again. `models`: the base models of its
    waiting pull, None if no pull waits; `has`: those of its last pull. `units`: the pass in its hands; `aside`: runs
    that it has left out of that pass. `release` and `hand_over`: runs that its next pass will name."""

    key: str
    name: str
    link: Link
    overdue: Overdue
    models: list[str] | None = None
    has: list[str] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    aside: set[str] = field(default_factory=set)
    release: list[str] = field(default_factory=list)
    hand_over: list[str] = field(default_factory=list)
    leaving: bool = False
    stats: dict[str, float] = field(default_factory=lambda: dict(_COUNTS))


class TrainerDesk:
    """Hands out passes of about `pass_tokens` tokens. A pass may take `pass_limit_s` (0: as long as it likes).
    `loading_s` says for how long a trainer has been loading a model."""

    worker = "trainer"

    def __init__(
        self,
        training: Training,
        pass_tokens: int,
        pass_limit_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        loading_s: LoadingFor = nobody_loads,
    ) -> None:
        self._training = training
        self._pass_tokens, self._pass_limit_s = pass_tokens, pass_limit_s
        self._residents = Residents(training, pass_tokens, clock)
        self._trainers: dict[str, _Trainer] = {}
        self._presence, self._loading_s = Presence(clock), loading_s
        self._lives = 0
        self._passes = 0
        self.stats: dict[str, float] = {**_COUNTS, "lost": 0}
        training.desks.append(self)

    async def serve(self, link: Link, name: str = "trainer") -> None:
        """Talk to one trainer until its link closes."""
        self._lives += 1
        key = f"{name} {self._lives}"  # a restarted trainer is another one
        trainer = self._trainers[key] = _Trainer(key, name, link, Overdue(lambda: _cut_off(name, link)))
        try:
            async for message in link.messages():
                await self._on(trainer, message)
        finally:
            await self._lost(trainer)

    def wake(self) -> None:
        """Give every waiting trainer its next pass, if there is work for it."""
        self._residents.observe()
        for key, run_id in self._residents.released():
            if key in self._trainers:
                self._trainers[key].release.append(run_id)
        for trainer in list(self._trainers.values()):
            if trainer.models is not None:
                self._give(trainer, trainer.models)

    def _give(self, trainer: _Trainer, models: list[str]) -> None:
        only = self._residents.only_of(trainer.key)
        units = compose(self._training.queue, models, self._pass_tokens, only)
        release, trainer.release = trainer.release, []
        hand_over, trainer.hand_over = trainer.hand_over, []
        if not (units or release or hand_over):
            return
        self._passes += 1
        trainer.models, trainer.units = None, units
        self._residents.taken(trainer.key, units)
        self._begin(units)
        model = units[0].base_model if units else ""
        soon = upcoming(self._training.queue, model, only)
        limit_s = self._pass_limit_s * max(1.0, sum(unit.tokens for unit in units) / self._pass_tokens)
        trainer.overdue.begin(limit_s)
        ops = [self._training.message_of(unit) for unit in units]
        trainer.link.send(Pass(self._passes, model, ops, release, soon, limit_s, hand_over))

    def _begin(self, units: list[Unit]) -> None:
        now = datetime.now(UTC)
        runs = len({u.send.run_id for u in units})
        organisations = len({u.op.org_id for u in units if u.op is not None})
        tokens = sum(u.tokens for u in units)
        for unit in units:
            if unit.op is not None:
                unit.op.running = True
                if not unit.send.replay:
                    unit.op.timings.begin(Stretch(self._passes, runs, organisations, tokens, now))

    def cancel(self, op: Operation) -> None:
        """Does nothing: training is never cancelled half way."""

    def policy_moved(self, moved: PolicyMoved) -> None:
        """Does nothing: the trainer made this version itself."""

    def drain(self) -> None:
        for trainer in self._trainers.values():
            self._leaves(trainer)
            trainer.link.send(Drain())

    def presence(self, base_model: str) -> Present:
        serves = any(not trainer.has or base_model in trainer.has for trainer in self._trainers.values())
        missing_s = self._presence.missing_s(base_model)
        return Present(bool(self._trainers), serves, self._loading_s(base_model), missing_s)

    def report(self) -> dict[str, Any]:
        """The counts of all trainers, the `moves` of runs from one trainer to another, and by trainer in `replicas`:
        its counts and how many runs live there."""
        here = self._trainers.values()
        replicas = {one.name: {**one.stats, "runs": self._residents.count(one.key)} for one in here}
        return {**self.stats, "moves": self._residents.moves, "replicas": replicas}

    async def _on(self, trainer: _Trainer, message: Any) -> None:
        if isinstance(message, Done):
            op = self._training.opened(message.op_id)
            self._training.finish(message)
            if op is not None:
                self._residents.over(op.lane, op.id)
        elif isinstance(message, InLoss):
            trainer.overdue.told(message)
        elif isinstance(message, PassOver):
            self._count(trainer, message)
        elif isinstance(message, Snapshot):
            await self._training.snapshot(message)
        elif isinstance(message, SetAside):
            trainer.aside.add(message.run_id)
            self._training.setbacks.set_aside(message)
        elif isinstance(message, HandedOver):
            await self._training.flush()  # so that what it has answered is not done again
            self._residents.handed_over(message.run_id, kept=message.kept)
            self.wake()
        elif isinstance(message, Leaving):
            self._leaves(trainer)
            self._give_back(trainer)  # it will do nothing of a pass that is on its way to it
        elif isinstance(message, PullPass):
            trainer.has = message.models
            self._got_on(trainer, self._end(trainer))
            if not trainer.leaving:
                trainer.models = message.models
                self._residents.offer(trainer.key, message.models, message.memory_bytes)
            for key, run_id in self._residents.even_out():
                self._trainers[key].hand_over.append(run_id)
            self.wake()

    def _leaves(self, trainer: _Trainer) -> None:
        trainer.leaving, trainer.models = True, None
        self._residents.retire(trainer.key)

    def _got_on(self, trainer: _Trainer, done: list[Unit]) -> None:
        """A pass is over, so no trainer was lost over its units: clear their suspicion."""
        aside, trainer.aside = trainer.aside, set()
        for unit in done:
            send, lane = unit.send, self._training.runs.get(unit.send.run_id)
            if send.run_id in aside:
                continue
            if lane is not None:
                lane.got_on()
            if unit.op is not None and (send.final or send.stop > unit.op.reached):
                was, unit.op.reached, unit.op.attempts = unit.op.attempts, send.stop, 0
                if was and not send.final:
                    self._training.note_attempts(unit.op)

    def _count(self, trainer: _Trainer, over: PassOver) -> None:
        organisations = {u.op.org_id for u in trainer.units if u.op is not None and not u.light and not u.send.replay}
        if not organisations:
            return
        for stats in (self.stats, trainer.stats):
            stats["passes"] += 1
            stats["shared_passes"] += len(organisations) > 1
            stats["tokens"] += over.tokens
            stats["busy_s"] += over.seconds

    async def _lost(self, trainer: _Trainer) -> None:
        """A trainer is gone, and with it the state of the runs that lived there: queue the units that rebuild them."""
        self.stats["lost"] += 1
        self._presence.saw(trainer.has)
        loss, overran = trainer.overdue.loss, trainer.overdue.overran
        held, trainer.models = self._give_back(trainer), None
        self._residents.retire(trainer.key)
        await self._training.flush()
        suspect(self._training, held, loss, overran=overran)
        await self._training.flush()
        del self._trainers[trainer.key]
        self._residents.gone(trainer.key)
        self.wake()

    def _give_back(self, trainer: _Trainer) -> list[Unit]:
        """Take back the units in the trainer's hands: nobody computes them now."""
        held = self._end(trainer)
        for unit in held:
            if unit.op is not None:
                unit.op.running = False
        return held

    def _end(self, trainer: _Trainer) -> list[Unit]:
        """The pass is over, finished or not. Returns its units, which are in the trainer's hands no more."""
        now = datetime.now(UTC)
        trainer.overdue.end()
        held, trainer.units = trainer.units, []
        for unit in held:
            self._residents.over(unit.send.run_id, unit.send.op_id)
            if unit.op is not None and not unit.send.replay:
                unit.op.timings.end(now)
        return held


def _cut_off(name: str, link: Link) -> None:
    log.error("%s has exceeded its time and has not ended: its link is closed", name)
    link.hang_up()
