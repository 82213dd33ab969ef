"""The order of one run's operations, as a state machine without I/O.

Operations run strictly by sequence number. One that arrives early is parked until the gap before it is filled. What
has changed the run since its last snapshot stays in the log: when the trainer that held the run is lost, the lane
answers with the units that rebuild it (snapshot, then the log) followed by everything not answered yet.

    lane = RunLane("org", spec)
    lane.arrive(op2)  -> []                      parked, 1 is missing
    lane.arrive(op1)  -> [unit 1, unit 2]        both may be queued now
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter

from msgspec.structs import replace
from weft.wire.checks.runs import is_not_taken, step_not_taken

from scheduler.links.messages import MUTATING, STEPS_COUNT_ON, OpKind, RunSpec, Snapshot, TrainOp
from scheduler.order.gradients import Gradients, Lacking
from scheduler.order.operations import INTERACTIVE, Operation
from scheduler.order.plans import Create, ForwardBackward, Load, Plan, Slice, Step

#: Operations that use the gradients before them, or replace them.
_USES = (OpKind.OPTIM_STEP, OpKind.LOAD_STATE)


@dataclass(frozen=True, eq=False)
class Unit:
    """An item of the fair queue: an operation or a slice of one, ready to be sent to a trainer."""

    op: Operation | None  # None: the restore of a snapshot, which no client asked for
    base_model: str
    send: TrainOp
    tokens: int
    alone: bool = False  # trainers were lost over this restore

    @property
    def suspect(self) -> bool:
        """True if a trainer was lost while it had this unit, which may be what killed it."""
        return self.alone or (self.op is not None and (self.op.alone or self.op.attempts > 0))

    @property
    def light(self) -> bool:
        """True for work without tokens: its cost grows with the size of the run, not with data
        (`scheduler.order.light_work`)."""
        return self.send.kind not in (OpKind.FORWARD, OpKind.FORWARD_BACKWARD)


def units_of(op: Operation, spec: RunSpec, *, replay: bool = False, again: bool = False, done: int = 0) -> list[Unit]:
    """One unit per slice of a forward or forward_backward, else one unit. Data before `done` are computed already."""
    kind = OpKind(op.kind)
    whole = op.plan.slices if isinstance(op.plan, ForwardBackward) else (Slice(0, 0, op.tokens),)
    slices = [part for part in whole if not done or part.start >= done]
    source = op.plan.source if isinstance(op.plan, Create | Load) else None
    return [
        Unit(
            op=op,
            base_model=spec.base_model,
            tokens=part.tokens,
            send=TrainOp(
                op_id=op.id,
                run_id=op.lane,
                seq=op.seq,
                kind=kind,
                body=op.body,
                body_ref=op.body_ref,
                start=part.start,
                stop=part.stop,
                final=i == len(slices) - 1,
                replay=replay,
                again=again,
                body_sha256=op.body_sha256,
                origin=op.origin,
                org_id=op.org_id,
                source_ref=source.ref if source is not None else "",
                target_ref=op.target_ref,
                with_optimizer=source is not None and source.with_optimizer,
                spec=spec if kind is OpKind.CREATE else None,
            ),
        )
        for i, part in enumerate(slices)
    ]


def came_at(plan: Plan, accepted_at: datetime) -> datetime:
    """When the request of a forward_backward came; if its plan does not say, when it was accepted."""
    return (plan.came_at if isinstance(plan, ForwardBackward) else None) or accepted_at


def uses_gradients(kind: str, error: str | None) -> bool:
    """True if the gradients gathered so far are used up when an operation of this kind has ended so: the next step
    begins without any (`Gradients.used`)."""
    return kind in _USES and (error is None or is_not_taken(error))


class RunLane:
    """One run: its operations that are released to the queue or parked, and how to rebuild it."""

    def __init__(
        self,
        org_id: str,
        spec: RunSpec,
        next_seq: int = 0,
        snapshot: Snapshot | None = None,
        priority: str = INTERACTIVE,
    ) -> None:
        self.run_id = spec.run_id
        self.org_id = org_id
        self.path = (spec.base_model, org_id, priority, spec.run_id)
        self.spec = spec
        self.next_seq = next_seq
        self.snapshot = snapshot
        self.resident = False  # a trainer holds the run, or units that rebuild it are queued
        self.broken: str | None = None  # why the run can do nothing more
        self.broken_category = "user"
        self.closing_since: float | None = None  # when its session was found to have ended, by the event loop's clock
        self.paused = ""  # why none of its units are queued for now
        self.setbacks = 0  # how often it was set aside, or a trainer lost over it, since its last progress
        self.gradients = Gradients()
        self._parked: dict[int, Operation] = {}
        self._refused: set[int] = set()  # numbers from next_seq on that are spent without an operation
        self._pending: dict[str, Operation] = {}  # released and not answered, in order of seq
        self._log: list[Operation] = []  # answered since the snapshot, and changing the run

    @property
    def closing(self) -> bool:
        return self.closing_since is not None

    @property
    def idle(self) -> bool:
        return not self._pending and not self._parked

    @property
    def at_work(self) -> bool:
        """True if some operation of the run is released and not answered yet."""
        return bool(self._pending)

    @property
    def parked(self) -> list[Operation]:
        """Operations that wait for an earlier one to arrive."""
        return list(self._parked.values())

    def arrive(self, op: Operation) -> list[Unit]:
        """Add a new operation. Returns the units that may be queued now, in order."""
        self._parked[op.seq] = op
        if op.kind == OpKind.FORWARD_BACKWARD:
            self.gradients.came(op.seq, came_at(op.plan, op.accepted_at))
        return self._advance()

    def refuse(self, seq: int) -> list[Unit]:
        """`seq` was spent on a request that could not be accepted. Returns the units that waited for it."""
        if seq >= self.next_seq:
            self._refused.add(seq)
        return self._advance()

    def spent(self, seq: int) -> bool:
        """True if an operation has used this number, be it a parked or a refused one."""
        return seq < self.next_seq or seq in self._parked or seq in self._refused

    def _advance(self) -> list[Unit]:
        ready: list[Operation] = []
        while self.next_seq in self._parked or self.next_seq in self._refused:
            if self.next_seq in self._refused:
                self._refused.discard(self.next_seq)
            else:
                ready.append(self._parked.pop(self.next_seq))
            self.next_seq += 1
        self._pending.update((o.id, o) for o in ready)
        if not ready or self.paused:
            return []
        if not self.resident:
            return self._rebuild(ready)
        return [u for o in ready for u in units_of(o, self.spec)]

    def remember(self, op: Operation) -> None:
        """At start-up: add an answered operation that a rebuild must replay."""
        insort(self._log, op, key=lambda other: other.seq)

    def is_past(self, op: Operation) -> bool:
        """True if a later operation has been answered already, and was so computed as if `op` had changed the run."""
        return self._goes_beyond(op.seq)

    def _goes_beyond(self, seq: int) -> bool:
        return bool(self._log) and self._log[-1].seq > seq

    def answered(self, op: Operation, ok: bool) -> None:
        self._pending.pop(op.id, None)
        if self._parked.get(op.seq) is op:
            del self._parked[op.seq]
        if ok and op.kind == OpKind.FORWARD_BACKWARD:
            self.gradients.over(op.seq, datetime.now(UTC))
        if op.outcome is not None and uses_gradients(op.kind, op.outcome.error):
            self.gradients.used(op.seq)
        op.attempts, op.reached, op.alone = 0, 0, False  # a replay is suspected anew
        if ok and op.kind in MUTATING:
            insort(self._log, op, key=lambda other: other.seq)

    def failed(self, seq: int, kind: str, why: str) -> None:
        """Note that operation `seq` has failed, and why: a step may depend on it."""
        if kind in STEPS_COUNT_ON:
            self.gradients.failed(seq, step_not_taken(kind, why))

    def sent(self, unit: Unit) -> TrainOp:
        """The unit's message to a trainer now; that of a step says which gradient it would lack."""
        op, send = unit.op, unit.send
        if op is None or send.replay or send.kind is not OpKind.OPTIM_STEP:
            return send
        heard_of, since = op.plan.heard_of if isinstance(op.plan, Step) else None, 0
        if self.gradients.any_failed:
            since = max((o.seq for o in self._pending.values() if o.kind in _USES and o.seq < op.seq), default=0)
        lacking = self.gradients.lacking(op.seq, since, heard_of)
        return replace(send, lacks=lacking.of, knows=lacking.knows) if lacking != Lacking() else send

    def lost(self) -> list[Unit]:
        """The trainer is gone. Returns all units to queue again; the caller has emptied the run's queue."""
        self.resident = False
        return self._all_again()

    def pause(self, why: str, *, kept: bool) -> None:
        """Queue nothing for now; with `kept` a trainer still holds the run. The caller has emptied the run's queue. If
        that contained replays behind an unanswered operation, the run has to be rebuilt."""
        first = min((op.seq for op in self._pending.values()), default=self.next_seq)
        self.paused, self.resident = why, self.resident and kept and not self._goes_beyond(first)
        self.setbacks += 1

    def resume(self) -> list[Unit]:
        """End the pause. Returns all units to queue."""
        self.paused = ""
        return self._all_again()

    def got_on(self) -> None:
        self.setbacks = 0

    def _all_again(self) -> list[Unit]:
        if not self._pending or self.paused:
            return []
        if not self.resident:
            return self._rebuild(list(self._pending.values()))
        return [u for o in self._pending.values() for u in self._units(o)]

    def _units(self, op: Operation, *, replay: bool = False) -> list[Unit]:
        done = self.snapshot.part_stop if self.snapshot is not None and self.snapshot.part_op == op.id else 0
        return units_of(op, self.spec, replay=replay, again=True, done=done)

    def replays(self) -> list[Operation]:
        """Operations that rebuild the run on top of its snapshot."""
        return list(self._log)

    def saved(self, seq: int, ref: str, part_op: str = "", part_stop: int = 0) -> list[Operation]:
        """The snapshot taken right after `seq` is durable (`scheduler.links.messages.Snapshot`). Returns the operations
        that need no replay any more."""
        self.snapshot = Snapshot(self.run_id, seq, ref, part_op, part_stop)
        covered = [op for op in self._log if op.seq <= seq]
        self._log = [op for op in self._log if op.seq > seq]
        return covered

    def abandon(self) -> list[Operation]:
        """Give up the run. Returns all operations that are not answered, parked ones included."""
        left = [*self._pending.values(), *self._parked.values()]
        self._pending.clear()
        self._parked.clear()
        return left

    def missing(self, op: Operation) -> int | None:
        """The sequence number that a parked operation waits for; None if it is not parked."""
        return self.next_seq if op.seq in self._parked else None

    def _rebuild(self, pending: list[Operation]) -> list[Unit]:
        """Units that rebuild the run on a new trainer and go on with `pending`, all in order of their numbers: an
        operation may have been answered before an earlier one."""
        self.resident = True
        units: list[Unit] = []
        if self.snapshot is not None:
            restore = TrainOp(
                op_id=f"restore-{self.run_id}",
                run_id=self.run_id,
                seq=self.snapshot.seq,
                kind=OpKind.CREATE,
                replay=True,
                source_ref=self.snapshot.ref,
                with_optimizer=True,
                spec=self.spec,
            )
            units.append(Unit(None, self.spec.base_model, restore, tokens=0, alone=self.setbacks > 0))
        ops = sorted([(o.seq, True, o) for o in self._log] + [(o.seq, False, o) for o in pending], key=itemgetter(0))
        return units + [u for _, replay, o in ops for u in self._units(o, replay=replay)]
