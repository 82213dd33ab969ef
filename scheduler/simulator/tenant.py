"""One simulated client: the loop of its `Workload`, with real operations on a real lane."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random

from scheduler.links.messages import OpKind, RunSpec
from scheduler.order.lanes import RunLane, Unit
from scheduler.order.operations import SAMPLE, Operation
from scheduler.order.plans import BODY_ONLY, ForwardBackward, Plan, Sample, slices
from scheduler.simulator.slots import MODEL, Job
from scheduler.simulator.workloads import Workload

_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass
class Tenant:
    org_id: str
    workload: Workload
    random: Random
    slice_tokens: int = 1024
    batch: int = 0  # number of batches whose sampling has begun
    version: int = 0  # number of steps trained
    sequences: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    half_way_tokens: int = 0  # sampled tokens, of steps that are not over
    waits_s: list[float] = field(default_factory=list)  # of requests: time in the queue
    training_s: list[float] = field(default_factory=list)  # from a batch's arrival at the trainer to its new policy
    sends_s: float = 0.0  # when its next request of the trainer may come
    _seq: int = 0
    _open: Counter[int] = field(default_factory=Counter)  # by batch: groups that have not come back
    _data: dict[int, list[int]] = field(default_factory=dict)
    _lengths: dict[str, list[int]] = field(default_factory=dict)  # by operation: the lengths of its data
    # by step at the trainer: since when, and the tokens sampled for it
    _at_trainer: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        spec = RunSpec(self.org_id, MODEL, 32, 32.0, 0, True, True, True)
        self.lane = RunLane(self.org_id, spec, priority=self.workload.priority)
        self.lane.resident = True

    def may_sample(self) -> bool:
        """True if the next batch may begin: there is one left, and the policy is recent enough."""
        ended = self.workload.steps and self.batch >= self.workload.steps
        return not ended and self.batch - self.version <= self.workload.overlap

    def forget(self) -> None:
        """Start counting anew; steps that are half done are kept."""
        self.sampled_tokens = self.trained_tokens = 0
        self.waits_s, self.training_s = [], []

    def jobs(self) -> list[Job]:
        """The requests of the next batch. They are sent at once, so they arrive in any order."""
        work, batch = self.workload, self.batch
        self.batch += 1
        self._open[batch] = work.groups
        made = []
        for group in range(work.groups):
            lengths = work.sample(self.random, self.sequences)
            self.sequences += len(lengths)
            plan = Sample(len(lengths), work.prompt, work.priority)
            most = work.prompt + len(lengths) * work.max_tokens
            name = f"{self.org_id}/{batch}/{group}"
            op = Operation(name, self.org_id, self.org_id, self.org_id, group, SAMPLE, MODEL, most, "", plan, _EPOCH)
            made.append(Job(op, lengths, batch, needs=f"{self.org_id}@{self.version}"))
        self.random.shuffle(made)
        return made

    def ended(self, job: Job) -> float:
        """A group has its last token. Returns how long its environment takes."""
        self.waits_s.append(job.started_s - job.pushed_s)
        self.sampled_tokens += sum(job.lengths)
        self.half_way_tokens += sum(job.lengths) * self.workload.trains
        return self.random.expovariate(1 / self.workload.env_s) if self.workload.env_s else 0.0

    def came_back(self, job: Job, now_s: float) -> list[Operation]:
        """A group is complete. Returns the operations for the trainer, if it is the last of its batch."""
        batch = job.batch
        self._data.setdefault(batch, []).extend(length + self.workload.prompt for length in job.lengths)
        self._open[batch] -= 1
        if self._open[batch]:
            return []
        data = self._data.pop(batch)
        if not self.workload.trains:
            self.version += 1
            return []
        self._at_trainer.append((now_s, sum(data) - len(data) * self.workload.prompt))
        plan = ForwardBackward(tuple(slices(data, self.slice_tokens)))
        backward = self._next(OpKind.FORWARD_BACKWARD, sum(data), plan)
        self._lengths[backward.id] = data
        ops = [backward, self._next(OpKind.OPTIM_STEP)]
        return [*ops, self._next(OpKind.SAVE_SAMPLER)] if self.workload.samples else ops

    def pairs_of(self, unit: Unit) -> int:
        """The pairs of tokens of one sequence, over all data of a unit."""
        send = unit.send
        return sum(length**2 for length in self._lengths.get(send.op_id, ())[send.start : send.stop])

    def trained(self, unit: Unit, now_s: float) -> bool:
        """A unit has been computed. Returns whether that ended a step."""
        self.trained_tokens += unit.tokens
        assert unit.op is not None
        if not unit.send.final:
            return False
        self.lane.answered(unit.op, True)
        self._lengths.pop(unit.op.id, None)
        if unit.op.kind != (OpKind.SAVE_SAMPLER if self.workload.samples else OpKind.OPTIM_STEP):
            return False
        self.lane.saved(unit.op.seq, "")
        since_s, tokens = self._at_trainer.popleft()
        self.training_s.append(now_s - since_s)
        self.half_way_tokens -= tokens * self.workload.samples
        self.version += 1
        return True

    def _next(self, kind: OpKind, tokens: int = 0, plan: Plan = BODY_ONLY) -> Operation:
        seq, self._seq = self._seq, self._seq + 1
        name = f"{self.org_id}:{seq}"
        return Operation(name, self.org_id, self.org_id, self.org_id, seq, kind, MODEL, tokens, "", plan, _EPOCH)
