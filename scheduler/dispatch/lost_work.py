"""When a trainer is lost, the operations that were in its hands are suspected of having caused it.

An operation that is suspected LIVES times without getting further in between is failed, so that it cannot take the
service down with it. An operation whose uploaded loss exceeded its time limit is failed at once: that is its user's
doing, and no other operation of the pass is suspected. A run that cannot be rebuilt for that reason waits, longer each
time.
"""

from __future__ import annotations

from scheduler.journal.training import Training
from scheduler.links.contract import LIVES
from scheduler.links.messages import Done, Failure, InLoss
from scheduler.order.lanes import RunLane, Unit
from scheduler.order.operations import Operation


def suspect(training: Training, held: list[Unit], loss: InLoss | None, *, overran: bool) -> None:
    """A trainer was lost with these units in its hands. `loss` is the uploaded loss that it was computing, `overran`
    whether that had exceeded its time."""
    for run_id in dict.fromkeys(unit.send.run_id for unit in held):
        if (lane := training.runs.get(run_id)) is not None:
            units = [unit for unit in held if unit.send.run_id == run_id]
            if loss is not None and overran:
                units = [unit for unit in units if unit.send.op_id == loss.op_id]
            _suspect(training, lane, units, loss, overran=overran)


def _suspect(training: Training, lane: RunLane, units: list[Unit], loss: InLoss | None, *, overran: bool) -> None:
    replayed = [u for u in units if u.op is None or u.send.replay]
    for op in (u.op for u in replayed if u.op is not None):
        op.alone = True
    lane.setbacks += bool(replayed)
    if replayed and lane.setbacks >= LIVES:
        training.setbacks.pause(lane, f"the trainer stopped {lane.setbacks} times while it rebuilt the run")
    for op in {u.op.id: u.op for u in units if u.op is not None and not u.send.replay}.values():
        if op.outcome is not None:
            continue
        op.alone = True
        op.attempts += 1
        training.note_attempts(op)
        mine = loss is not None and loss.op_id == op.id
        if op.attempts < LIVES and not (mine and overran):
            continue
        if lane.is_past(op):  # later operations were computed on the run as this one had changed it
            training.setbacks.break_run(lane, _gave_up(op))
        elif loss is not None and mine:
            training.finish(Done(op.id, facts={"tokens": loss.tokens}, failure=_too_long(loss)))
        else:
            training.finish(Done(op.id, failure=Failure(_gave_up(op))))


def _too_long(loss: InLoss) -> Failure:
    return Failure(
        f"custom loss: it took longer than the {loss.limit_s:.3g} s that it may take on a part of these data, and was "
        "ended; the operation is given up. Use a loss of fewer nodes, or fewer elements in them",
        "user",
        ran=True,
    )


def _gave_up(op: Operation) -> str:
    return f"the trainer stopped {op.attempts} times while it ran this operation; it was given up and is not billed"
