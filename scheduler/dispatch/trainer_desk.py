"""Where the trainer comes for work, between the journal's queue and the link.

The desk hands out work when the trainer has asked for it and there is some, whichever comes last: pull, not push. What
is in its hands when its link closes goes back to the queue; an operation that was there LIVES times when a trainer died
is failed instead, so that it cannot take the service down with it. One whose uploaded loss took longer than it may is
failed at once: that is its user's doing, and no other operation of the pass is suspected.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from scheduler.dispatch.overdue import Overdue
from scheduler.journal.training import Training
from scheduler.links.contract import LIVES
from scheduler.links.messages import (
    Done,
    Drain,
    Failure,
    InLoss,
    Pass,
    PassOver,
    PolicyMoved,
    PullPass,
    SetAside,
    Snapshot,
)
from scheduler.links.sockets import Link
from scheduler.order.compose import compose, upcoming
from scheduler.order.lanes import RunLane, Unit
from scheduler.order.operations import Operation
from scheduler.order.timings import Stretch

log = logging.getLogger(__name__)


class TrainerDesk:
    """Hands out passes. One link at a time: the embedded service has one trainer. A pass of `pass_tokens` may take
    `pass_limit_s`, or for ever (0)."""

    worker = "trainer"

    def __init__(self, training: Training, pass_tokens: int, pass_limit_s: float = 0.0) -> None:
        self._training = training
        self._pass_tokens, self._pass_limit_s = pass_tokens, pass_limit_s
        self._overdue = Overdue(self._cut_off)
        self._link: Link | None = None
        self._models: list[str] | None = None  # what the waiting pull can serve; None when none waits
        self._units: list[Unit] = []  # the pass in the trainer's hands
        self._aside: set[str] = set()  # runs that it has left out of this pass
        self._passes = 0
        self.stats = {"passes": 0, "shared_passes": 0, "tokens": 0, "busy_s": 0.0, "lost": 0}
        training.desks.append(self)

    async def serve(self, link: Link) -> None:
        """Talk to one trainer until its link closes."""
        self._link = link
        try:
            async for message in link.messages():
                await self._on(message)
        finally:
            self._link = self._models = None
            await self._lost()

    def wake(self) -> None:
        """Give the waiting trainer its next pass, if there is anything to do."""
        if self._link is None or self._models is None:
            return
        units = compose(self._training.queue, self._models, self._pass_tokens)
        release, self._training.released = self._training.released, []
        if not units and not release:
            return
        self._models = None
        self._units = units
        self._passes += 1
        self._begin(units)
        model = units[0].base_model if units else ""
        soon = upcoming(self._training.queue, model)
        limit_s = self._pass_limit_s * max(1.0, sum(unit.tokens for unit in units) / self._pass_tokens)
        self._overdue.begin(limit_s)
        self._link.send(Pass(self._passes, model, [u.send for u in units], release, soon, limit_s))

    def _cut_off(self) -> None:
        log.error("the trainer has exceeded its time and has not ended: its link is closed")
        if self._link is not None:
            self._link.hang_up()

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

    def _end(self) -> list[Unit]:
        """The pass is over, one way or the other: nothing is in the trainer's hands. Returns what was."""
        now = datetime.now(UTC)
        self._overdue.end()
        held, self._units = self._units, []
        for unit in held:
            if unit.op is not None and not unit.send.replay:
                unit.op.timings.end(now)
        return held

    def cancel(self, op: Operation) -> None:
        """Training is never cancelled half way."""

    def policy_moved(self, moved: PolicyMoved) -> None:
        """Trainers know."""

    def drain(self) -> None:
        if self._link is not None:
            self._link.send(Drain())

    @property
    def attached(self) -> bool:
        return self._link is not None

    async def _on(self, message: Any) -> None:
        if isinstance(message, Done):
            self._training.finish(message)
        elif isinstance(message, InLoss):
            self._overdue.told(message)
        elif isinstance(message, PassOver):
            self._count(message)
        elif isinstance(message, Snapshot):
            await self._training.snapshot(message)
        elif isinstance(message, SetAside):
            self._aside.add(message.run_id)
            self._training.setbacks.set_aside(message)
        elif isinstance(message, PullPass):
            self._models = message.models
            self._got_on(self._end())
            self.wake()

    def _got_on(self, done: list[Unit]) -> None:
        """A pass is over: no trainer was lost over what was in it."""
        aside, self._aside = self._aside, set()
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

    def _count(self, over: PassOver) -> None:
        organisations = {u.op.org_id for u in self._units if u.op is not None and not u.light and not u.send.replay}
        if not organisations:
            return
        self.stats["passes"] += 1
        self.stats["shared_passes"] += len(organisations) > 1
        self.stats["tokens"] += over.tokens
        self.stats["busy_s"] += over.seconds

    async def _lost(self) -> None:
        """The trainer is gone, and with it every run's state: queue again what rebuilds them."""
        self.stats["lost"] += 1
        loss, overran = self._overdue.loss, self._overdue.overran
        held = self._end()
        await self._training.flush()
        for run_id in dict.fromkeys(unit.send.run_id for unit in held):
            if (lane := self._training.runs.get(run_id)) is not None:
                units = [unit for unit in held if unit.send.run_id == run_id]
                if loss is not None and overran:
                    units = [unit for unit in units if unit.send.op_id == loss.op_id]
                self._suspect(lane, units, loss, overran=overran)
        await self._training.flush()
        for lane in list(self._training.runs.values()):
            self._training.rebuild(lane)
        self.wake()

    def _suspect(self, lane: RunLane, units: list[Unit], loss: InLoss | None, *, overran: bool) -> None:
        """A trainer was lost with these in its hands. An operation over which that happens again and again, getting no
        further in between, is given up, and at once if its `loss` overran; a run that cannot be rebuilt for that reason
        waits, longer each time."""
        replayed = [u for u in units if u.op is None or u.send.replay]
        for op in (u.op for u in replayed if u.op is not None):
            op.alone = True
        lane.setbacks += bool(replayed)
        if replayed and lane.setbacks >= LIVES:
            self._training.setbacks.pause(lane, f"the trainer stopped {lane.setbacks} times while it rebuilt the run")
        for op in {u.op.id: u.op for u in units if u.op is not None and not u.send.replay}.values():
            if op.outcome is not None:
                continue
            op.running, op.alone = False, True
            op.attempts += 1
            self._training.note_attempts(op)
            mine = loss is not None and loss.op_id == op.id
            if op.attempts < LIVES and not (mine and overran):
                continue
            if lane.is_past(op):  # what is behind it was computed on a run that it had changed
                self._training.setbacks.break_run(lane, _gave_up(op))
            elif loss is not None and mine:
                self._training.finish(Done(op.id, facts={"tokens": loss.tokens}, failure=_too_long(loss)))
            else:
                self._training.finish(Done(op.id, failure=Failure(_gave_up(op))))


def _too_long(loss: InLoss) -> Failure:
    return Failure(
        f"custom loss: it took longer than the {loss.limit_s:.3g} s that it may take on a part of these data, and was "
        "ended; the operation is given up. Use a loss of fewer nodes, or fewer elements in them",
        "user",
        ran=True,
    )


def _gave_up(op: Operation) -> str:
    return f"the trainer stopped {op.attempts} times while it ran this operation; it was given up and is not billed"
