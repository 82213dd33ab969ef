"""The processes of bench/leader.py, and what they find in the database.

- the leader: a replica as `weftd serve` with a `redis_url` has it, without its HTTP front;
- the clients: REPLICAS more, which accept operations and wait for them as the front does (`taken`, `accept`,
  `outcome`), each its part of RUNS runs that keep DEEP forward_backwards and optim_steps in flight, and of SAMPLING
  clients with a sample each: one process of Python would be full before the leader is;
- the workers: 8 trainers and 32 generators, threads of one process, which answer what they get.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from sqlalchemy.orm import Session

from api.server.workers.shared_machines import SharedMachines
from billing.prices import load_prices
from scheduler.journal.ending.completions import CLIENT_STRIDE
from scheduler.links.messages import (
    Done,
    HandedOver,
    OpKind,
    Pass,
    PassOver,
    PullPass,
    PullSamples,
    RunSpec,
    SampleWork,
    Snapshot,
)
from scheduler.links.sample_link import SampleLink
from scheduler.links.train_link import TrainerLink
from scheduler.order.operations import SAMPLE, NewOperation, Outcome
from scheduler.order.plans import BODY_ONLY, Create, ForwardBackward, Plan, Sample, Slice
from store import tables
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from store.settings import Settings

MODEL = "bench/model"
ORGS, RUNS, DEEP, SAMPLING, REPLICAS = 16, 64, 4, 256, 2
TRAINERS, GENERATORS, SLOTS = 8, 32, 16
#: Operations of a run between two saves of its state.
SAVE_EVERY = 64
BODY, BATCH = b"x" * 200, ForwardBackward((Slice(0, 1, 64),))


class Places(msgspec.Struct, frozen=True):
    """The facts that the processes are started with. `seconds`: how long the clients go on; `part`: which part of the
    clients this process is."""

    folder: str
    database: str
    redis: str
    seconds: float
    part: int = 0

    @property
    def settings(self) -> Settings:
        return Settings(data_dir=Path(self.folder), redis_url=self.redis, database_url=self.database)

    @property
    def blobs(self) -> FolderBlobs:
        return FolderBlobs(Path(self.folder) / "blobs")

    def replica(self) -> tuple[Database, SharedMachines]:
        database = Database(self.database)
        return database, SharedMachines(self.settings, {}, database, self.blobs, load_prices())


# ---- the processes


async def lead(places: Places) -> None:
    """Run a replica that no client talks to."""
    database, machines = places.replica()
    machines.start()
    while not machines.stats()["replica"]["leads"]:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    if not machines.stats()["replica"]["leads"]:
        raise RuntimeError("another replica leads: this one had too little of its cores to renew its lease in time")
    await machines.stop()
    database.close()


def work(places: Places) -> None:
    """Run trainers and generators until the input ends."""
    over = threading.Event()
    threads = [threading.Thread(target=train, args=(places, over), daemon=True) for _ in range(TRAINERS)]
    threads += [threading.Thread(target=generate, args=(places, over), daemon=True) for _ in range(GENERATORS)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join(10)


def train(places: Places, over: threading.Event) -> None:
    """Answer as a trainer. The states that it reports as saved do not exist: nobody ever reads them."""
    link = TrainerLink(places.redis, places.blobs, over.is_set)
    link.send(PullPass([MODEL]))
    latest: dict[str, int] = {}
    while not over.is_set():
        found = link.recv(0.5)
        if not isinstance(found, Pass):
            continue
        for run_id in found.hand_over:
            link.send(Snapshot(run_id, latest.get(run_id, 0), f"runs/{run_id}/{uuid.uuid4().hex}"))
            link.send(HandedOver(run_id))
        for op in found.ops:
            latest[op.run_id] = op.seq
            facts = {"tokens": 64} if op.kind is OpKind.FORWARD_BACKWARD else {"version": op.seq}
            if op.final and not op.replay:
                link.send(Done(op.op_id, b"{}", facts))
            if op.seq % SAVE_EVERY == 0:
                link.send(Snapshot(op.run_id, op.seq, f"runs/{op.run_id}/{uuid.uuid4().hex}"))
        link.send(PassOver(found.pass_id, 64 * len(found.ops), len(found.ops), 0.0))
        link.send(PullPass([MODEL]))
    link.close()


def generate(places: Places, over: threading.Event) -> None:
    link = SampleLink(places.redis, places.blobs)
    while not over.is_set():
        link.send(PullSamples([MODEL], SLOTS))
        found = link.recv(0.5)
        if isinstance(found, SampleWork):
            for op in found.ops:
                link.send(Done(op.op_id, b"{}", {"prefill": 16, "cached_prefill": 0, "sample": 16}))
    link.close()


async def ask(places: Places) -> None:
    """Run the clients of a replica. Prints how many operations ended in the time."""
    database, machines = places.replica()
    machines.start()
    await asyncio.sleep(1)  # until it hears what ends
    clients = Clients(machines, time.monotonic() + 60.0)
    runs, sampling = range(places.part, RUNS, REPLICAS), range(places.part, SAMPLING, REPLICAS)
    await asyncio.gather(*map(clients.begin, runs))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    clients.begin_to_count(time.monotonic() + places.seconds)
    await asyncio.gather(*map(clients.steps, runs), *map(clients.samples, sampling))
    print(json.dumps(clients.counts), flush=True)
    await asyncio.to_thread(sys.stdin.readline)  # while it is looked at
    await machines.stop()
    database.close()


class Clients:
    """The clients' requests until `end`, and how many operations of each sort had ended by then."""

    def __init__(self, machines: SharedMachines, end: float) -> None:
        self._journal, self._end = machines.journal, end
        self.counts = {"training": 0, "samples": 0}

    def begin_to_count(self, end: float) -> None:
        self._end, self.counts = end, dict.fromkeys(self.counts, 0)

    async def begin(self, number: int) -> None:
        spec = RunSpec(run_of(number), MODEL, 8, 32.0, number, True, True, False)
        run = tables.Run(
            id=spec.run_id,
            org_id=org_of(number),
            session_id=session_of(org_of(number)),
            model_seq_id=number,
            state="live",
            user_metadata={},
            created_at=datetime.now(UTC),
            last_request_at=datetime.now(UTC),
            **{name: value for name, value in msgspec.structs.asdict(spec).items() if name != "run_id"},
        )
        await self._one(_operation(number, spec.run_id, 0, OpKind.CREATE, Create(spec, "interactive")), run)

    async def steps(self, number: int) -> None:
        """Keep DEEP operations of one run in flight."""
        room, under_way, seq = asyncio.Semaphore(DEEP), set[asyncio.Task[None]](), 0
        while time.monotonic() < self._end:
            seq += 1
            plan, kind = (BATCH, OpKind.FORWARD_BACKWARD) if seq % 2 else (BODY_ONLY, OpKind.OPTIM_STEP)
            await room.acquire()
            task = asyncio.create_task(self._one(_operation(number, run_of(number), seq, kind, plan)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            task.add_done_callback(lambda _: room.release())
        await asyncio.gather(*under_way)

    async def samples(self, number: int) -> None:
        lane, seq = sampler_of(org_of(number)), number * CLIENT_STRIDE
        while time.monotonic() < self._end:
            await self._one(_operation(number, lane, seq, SAMPLE, Sample(1, 16, "interactive")))
            seq += 1

    async def _one(self, new: NewOperation, *rows: tables.Base) -> None:
        if not rows:
            await self._journal.taken(new.lane, new.seq)
        request_id, outcome = await self._journal.accept(new, *rows), None
        while not isinstance(outcome, Outcome):
            outcome = await self._journal.outcome(new.org_id, request_id, 40.0)
        if outcome.error is not None:
            raise RuntimeError(outcome.error)
        self.counts["samples" if new.kind == SAMPLE else "training"] += time.monotonic() < self._end


def org_of(number: int) -> str:
    return f"org-{number % ORGS}"


def session_of(org_id: str) -> str:
    return f"{org_id}-session"


def run_of(number: int) -> str:
    return f"{session_of(org_of(number))}:train:{number}"


def sampler_of(org_id: str) -> str:
    return f"{session_of(org_id)}:sample:0"


def _operation(number: int, lane: str, seq: int, kind: str, plan: Plan) -> NewOperation:
    org_id, tokens = org_of(number), {OpKind.FORWARD_BACKWARD: 64, SAMPLE: 32}.get(kind, 0)
    return NewOperation(org_id, session_of(org_id), lane, seq, kind, MODEL, tokens, BODY, plan)


def set_up(session: Session) -> None:
    now = datetime.now(UTC)
    for org_id in {org_of(number) for number in range(ORGS)}:
        session.add(tables.Organisation(id=org_id, name=org_id, created_at=now))
        session.flush()
        session.add(
            tables.Session(
                id=session_of(org_id),
                org_id=org_id,
                tags=[],
                state="active",
                sdk_version="",
                user_metadata={},
                created_at=now,
                last_seen_at=now,
            )
        )
        session.flush()
        session.add(
            tables.Sampler(
                id=sampler_of(org_id),
                org_id=org_id,
                session_id=session_of(org_id),
                sampling_session_seq_id=0,
                base_model=MODEL,
                model_path=None,
                adapter_ref="",
                run_id=None,
                kind="base",
                created_at=now,
            )
        )
