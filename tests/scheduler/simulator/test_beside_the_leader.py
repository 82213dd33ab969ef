"""The simulator's trainers beside the service's own leader, on one virtual clock: journal, desk and lanes are real, and
trainers take for a pass what the simulated machine takes. The same clients get the same passes, and the same tokens."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from scheduler.dispatch.trainer_desk import TrainerDesk
from scheduler.links.messages import Done, HandedOver, OpKind, Pass, PassOver, PullPass, RunSpec, Snapshot, TrainOp
from scheduler.order.lanes import Unit
from scheduler.order.operations import NewOperation
from scheduler.order.plans import BODY_ONLY, Create, ForwardBackward, Plan, Slice
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Result, Simulation
from scheduler.simulator.trainer import Work, stages_of
from scheduler.simulator.workloads import Workload
from store import tables
from tests import rows
from tests.scheduler.dispatch.link import Link
from tests.scheduler.journal.kit import NOW, Service

TIMES = Cluster(
    replicas=1, gpus_per_replica=1, slots=1, ranks=1, pass_tokens=512, pass_s=0.05, slice_s=0.0061, light_s=0.0037,
    trained_tokens_per_s_per_gpu=2000.0, pair_s=1.5e-6, turnaround_s=0.0173,
)  # fmt: skip
IN_FLIGHT, SECONDS = 2, 8.0


def run_of(tenant: int) -> str:
    return f"s{tenant}:train:0"


@dataclass
class Played:
    """A leader, trainers and clients. `batches`: (sequences, length) of each client; each begins `apart_s` after the
    one before."""

    service: Service
    cluster: Cluster
    batches: list[tuple[int, int]]
    apart_s: float = 0.0
    now_s: float = 0.0
    done: Work = field(default_factory=Work)
    trained: Counter[int] = field(default_factory=Counter)
    _events: list[tuple[float, int, Callable[[], Awaitable[None]]]] = field(default_factory=list)
    _number: int = 0
    _seqs: Counter[int] = field(default_factory=Counter)
    _sends_s: dict[int, float] = field(default_factory=dict)  # when each client's next request may come

    def __post_init__(self) -> None:
        training = self.service.journal.training
        training.desks.remove(self.service.trainer)
        self.desk = TrainerDesk(training, self.cluster.pass_tokens, 0.0, lambda: self.now_s)
        self.links = [Link() for _ in range(self.cluster.trainers)]

    def at(self, seconds: float, then: Callable[[], Awaitable[None]]) -> None:
        self._number += 1
        heapq.heappush(self._events, (seconds, self._number, then))

    async def play(self) -> None:
        serving = [asyncio.create_task(self.desk.serve(link, f"trainer-{n}")) for n, link in enumerate(self.links)]
        tenants = range(len(self.batches))
        for link in self.links:
            await self.settled(link, PullPass(["m"]))
        for tenant in tenants:
            await self.create(tenant)
        for tenant in tenants:
            for _ in range(IN_FLIGHT):
                self.at(tenant * self.apart_s, partial(self.step, tenant))
        while self._events and self._events[0][0] <= SECONDS:
            self.now_s = self._events[0][0]
            self.service.journal.training.desks.remove(self.desk)  # until all have come that come at this moment
            while self._events and self._events[0][0] == self.now_s:
                await heapq.heappop(self._events)[2]()
            self.service.journal.training.desks.append(self.desk)
            self.desk.wake()
            for link in self.links:
                if not link._sent.empty():
                    await self.begin(link, link._sent.get_nowait())
        for link in self.links:
            link.close()
        await asyncio.gather(*serving)
        await self.service.journal.flush()

    async def create(self, tenant: int) -> None:
        org, run = f"org{tenant}", run_of(tenant)
        plan = Create(RunSpec(run, "m", 32, 32.0, 0, True, True, True), "interactive")
        await self.ask(tenant, OpKind.CREATE, plan, rows.run_row(org, NOW, run, f"s{tenant}"))
        await self.settled(self.links[0])
        (link,) = (link for link in self.links if not link._sent.empty())
        pass_ = link._sent.get_nowait()
        await self.settled(link, *(Done(op.op_id) for op in pass_.ops), PassOver(1, 0, 1, 0.0), PullPass(["m"]))

    async def settled(self, link: Link, *messages: object) -> None:
        """Wait until a trainer has said this, and the leader has done all that follows from it."""
        for message in messages:
            link.say(message)
        while not link._said.empty():  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(3):
            await self.service.journal.flush()
            await asyncio.sleep(0.001)

    async def ask(self, tenant: int, kind: OpKind, plan: Plan, *made: tables.Base) -> None:
        sequences, length = self.batches[tenant]
        tokens = sequences * length if isinstance(plan, ForwardBackward) else 0
        org, run, seq = f"org{tenant}", run_of(tenant), self._seqs[tenant]
        self._seqs[tenant] += 1
        new = NewOperation(org, f"s{tenant}", run, seq, kind, "m", tokens, b"" if made else b"body", plan)
        await self.service.journal.accept(new, *made)

    async def step(self, tenant: int) -> None:
        sequences, length = self.batches[tenant]
        slices = (Slice(0, sequences, sequences * length),)
        for kind, plan in ((OpKind.FORWARD_BACKWARD, ForwardBackward(slices)), (OpKind.OPTIM_STEP, BODY_ONLY)):
            comes_s = max(self.now_s, self._sends_s.get(tenant, 0.0))
            self._sends_s[tenant] = comes_s + self.cluster.request_s
            self.at(comes_s, partial(self.ask, tenant, kind, plan))

    async def begin(self, link: Link, pass_: Pass) -> None:
        """Compute a pass, in stages."""
        for run in pass_.hand_over:
            await self.settled(link, Snapshot(run, self._seqs[tenant_of(run)], f"runs/{run}/state"), HandedOver(run))
        stages = deque(stages_of(Unit(None, "m", op, self.tokens_of(op)) for op in pass_.ops))
        self.done.passes += any(op.kind is OpKind.FORWARD_BACKWARD for op in pass_.ops)
        self.next_stage(link, pass_, stages)

    def next_stage(self, link: Link, pass_: Pass, stages: deque[list[Unit]]) -> None:
        units = stages.popleft() if stages else []
        work = Work.of_stage(
            units, lambda unit: self.tokens_of(unit.send) * self.batches[tenant_of(unit.send.run_id)][1]
        )
        work.seconds = self.cluster.pass_takes_s(work.tokens, work.stages, work.slices, work.light, work.pairs)

        async def over() -> None:
            self.done.add(work)
            for unit in units:
                tenant = tenant_of(unit.send.run_id)
                self.trained[tenant] += unit.tokens
                if unit.send.kind is OpKind.OPTIM_STEP:
                    self.at(self.now_s + self.cluster.turnaround_s, partial(self.step, tenant))
            await self.settled(link, *(Done(unit.send.op_id, b"result", {"tokens": unit.tokens}) for unit in units))
            if stages:
                self.next_stage(link, pass_, stages)
            else:
                link.say(PassOver(pass_.pass_id, 0, 1, 0.0))
                await self.settled(link, PullPass(["m"]))

        self.at(self.now_s + work.seconds, over)

    def tokens_of(self, op: TrainOp) -> int:
        sequences, length = self.batches[tenant_of(op.run_id)]
        return sequences * length if op.kind is OpKind.FORWARD_BACKWARD else 0


def tenant_of(run: str) -> int:
    return int(run[1:].partition(":")[0])


def service_for(folder: Path, tenants: int) -> Service:
    service = Service(folder)

    def write(session: Session) -> None:
        for tenant in range(tenants):
            session.add(tables.Organisation(id=f"org{tenant}", name=f"org{tenant}", created_at=NOW))
            session.flush()
            session.add(rows.session_row(f"org{tenant}", NOW, f"s{tenant}"))
        session.flush()

    service.database.write_now(write)
    return service


LOADS = {
    "three alike": [(1, 128)] * 3,
    "short sequences": [(2, 32)] * 8,
    "long sequences": [(1, 256)] * 4,
    "many tenants": [(1, 64)] * 16,
    "uneven": [(1, 32), (1, 32), (1, 64), (1, 128), (2, 128), (2, 128)],
}
#: All large runs are created on one trainer.
MOVED = [(2, 128), (1, 32)] * 3


def both(folder: Path, batches: list[tuple[int, int]], cluster: Cluster, apart_s: float = 0.0) -> tuple[Played, Result]:
    """The passes as the service's leader has them, and as the simulator does."""

    async def leading() -> Played:
        leader = Played(service_for(folder, len(batches)), cluster, batches, apart_s)
        await asyncio.wait_for(leader.play(), 60)
        return leader

    loop = Workload("loop", 1, prompt=0, samples=False, overlap=IN_FLIGHT - 1)
    loads = [
        replace(loop, group_size=sequences, lengths=(length,), begins_s=number * apart_s)
        for number, (sequences, length) in enumerate(batches)
    ]
    return asyncio.run(leading()), Simulation(cluster, loads).run(SECONDS)


@pytest.mark.parametrize(("load", "trainers"), [*((load, 2) for load in LOADS), ("uneven", 1)])
@pytest.mark.parametrize(("apart_s", "request_s"), [(0.0, 0.0), (0.0297, 0.0031)], ids=["at once", "as they ask"])
def test_the_same_clients_get_the_same_passes(
    tmp_path: Path, load: str, trainers: int, apart_s: float, request_s: float
) -> None:
    cluster = replace(TIMES, trainers=trainers, request_s=request_s)
    led, simulated = both(tmp_path, LOADS[load], cluster, apart_s)
    assert led.desk.report()["moves"] == 0
    assert replace(simulated.trainers, seconds=0) == replace(led.done, seconds=0)
    assert [tenant.trained_tokens for tenant in simulated.tenants] == [led.trained[n] for n in range(len(LOADS[load]))]


def test_runs_move_alike(tmp_path: Path) -> None:
    """Apart from the time that handing a run over takes, which is not simulated."""
    led, simulated = both(tmp_path, MOVED, replace(TIMES, trainers=2))
    assert led.desk.report()["moves"] > 0
    assert simulated.trainers.tokens == pytest.approx(led.done.tokens, rel=0.1)
    for number, tenant in enumerate(simulated.tenants):
        assert tenant.trained_tokens == pytest.approx(led.trained[number], rel=0.1)
