"""A journal on a real database and real blobs, its two desks, and operations for them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import select

from billing.prices import load_prices
from scheduler.dispatch.sample_desk import SampleDesk
from scheduler.dispatch.trainer_desk import TrainerDesk
from scheduler.journal.journal import Journal
from scheduler.links.messages import Done, Pass, PassOver, PullPass, RunSpec
from scheduler.links.sockets import ServerLink, WorkerLink
from scheduler.order.operations import NewOperation, Outcome
from scheduler.order.plans import BODY_ONLY, Create, Plan, Sample, Save
from store import tables
from store.blobs.folder import FolderBlobs
from store.blobs.room import Room
from tests import rows
from tests.migrated import database_in

NOW = datetime.now(UTC)
RUN = "s:train:0"
#: Too large for a row, so it is stored as a file.
RESULT = b"result" * 200
ANSWERS = {"forward": RESULT, "forward_backward": RESULT, "optim_step": b"result"}


class Service:
    """A journal on a data folder, and the two desks."""

    def __init__(self, folder: Path, max_queued: int = 100, room: Room | None = None) -> None:
        self.database = database_in(folder)
        self.blobs = FolderBlobs(folder / "blobs")
        self.journal = Journal(self.database, self.blobs, load_prices(), max_queued, room=room)
        self.trainer = TrainerDesk(self.journal.training, pass_tokens=100)
        self.generator = SampleDesk(self.journal)

    @asynccontextmanager
    async def worker(self, desk: TrainerDesk | SampleDesk) -> AsyncIterator[WorkerLink]:
        """Attach a worker; leaving the context is its death."""
        ours, theirs = socket.socketpair()
        link = WorkerLink(theirs.detach())
        serving = asyncio.create_task(desk.serve(ServerLink(ours)))
        try:
            yield link
        finally:
            link._socket.close()
            await serving

    async def ask(self, link: WorkerLink, message: Any) -> Any:
        link.send(message)
        return await asyncio.to_thread(link.recv, 5.0)

    async def answer(self, link: WorkerLink, pass_: Pass, seconds: float = 0.01) -> None:
        for op in pass_.ops:
            if op.final and not op.replay:
                facts = {"tokens": 10, "size_bytes": 5}
                link.send(Done(op.op_id, ANSWERS.get(op.kind, b""), facts))
        link.send(PassOver(pass_.pass_id, 10, 1, seconds))

    def rows(self, table: type[tables.Base]) -> list[Any]:
        with self.database.read() as session:
            return list(session.scalars(select(table)))


def run_row(run: str = RUN, org: str = "org") -> tables.Run:
    return rows.run_row(org, NOW, run)


def create(run: str = RUN, org: str = "org") -> NewOperation:
    spec = RunSpec(run, "m", 8, 32.0, 0, train_attn=True, train_mlp=True, train_unembed=True)
    return NewOperation(org, "s", run, 0, "create", "m", 1, plan=Create(spec, "interactive"))


def train(seq: int, kind: str = "forward_backward", body: bytes = b"body", plan: Plan = BODY_ONLY) -> NewOperation:
    return NewOperation("org", "s", RUN, seq, kind, "m", 10, body, plan)


def save(seq: int, name: str) -> NewOperation:
    return NewOperation("org", "s", RUN, seq, "save_state", "m", 1, plan=Save("weights", name))


def sample(seq: int) -> NewOperation:
    return NewOperation("org", "s", "s:sample:0", seq, "sample", "m", 20, b"{}", Sample(2, 0, "interactive"))


def organisation(service: Service) -> None:
    def write(session: Any) -> None:
        session.add(tables.Organisation(id="org", name="org", created_at=NOW))
        session.flush()
        session.add(rows.session_row("org", NOW))
        session.flush()
        session.add(
            tables.Sampler(
                id="s:sample:0", org_id="org", session_id="s", sampling_session_seq_id=0, base_model="m",
                adapter_ref="weights/a", run_id=RUN, kind="snapshot", created_at=NOW,
            )
        )  # fmt: skip

    service.database.write_now(write)


def go(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


async def outcome(service: Service, request_id: str) -> Outcome:
    found = await service.journal.outcome("org", request_id, 5)
    assert isinstance(found, Outcome)
    return found


async def first_pass(service: Service, link: WorkerLink) -> Pass:
    """Create the run and answer it."""
    await service.journal.accept(create(), run_row())
    pass_ = await service.ask(link, PullPass(["m"]))
    await service.answer(link, pass_)
    return pass_


def ops(pass_: Pass) -> list[tuple[int, bool]]:
    return [(op.seq, op.replay) for op in pass_.ops]
