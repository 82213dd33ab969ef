"""Operations are accepted and settled while connections to the database die at every round trip; clients send again, as
SDKs do, also at the same moment and to another replica; two may settle one operation; leaders are followed by others.

At every moment the books agree, and no limit is passed. What a client was given an id for is there, once, with its
body; what was refused has left nothing; what ended is billed once, as it ended. One at a time, each request is answered
as an oracle answers that does one operation after the other.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import structs
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from billing.money import ledger
from billing.money.accounts import OutOfMoney
from billing.money.budgets import set_budget
from billing.money.wallets import set_mode
from billing.prices import KINDS, load_prices
from scheduler.cluster import fence
from scheduler.cluster.fence import Fenced, Superseded
from scheduler.journal.accepting.acceptance import Acceptance
from scheduler.journal.accepting.admission import Admission
from scheduler.journal.accepting.backlog import Backlog
from scheduler.journal.accepting.in_flight import InFlight
from scheduler.journal.accepting.numbers import known
from scheduler.journal.ending.meters import Meters
from scheduler.journal.ending.outcomes import Answers
from scheduler.journal.ending.recording import DatabaseRecorder
from scheduler.journal.rows import from_row
from scheduler.journal.samples.samplers import Samplers
from scheduler.links.messages import Done, Failure, OpKind
from scheduler.order.operations import SAMPLE, NewOperation, Operation
from scheduler.order.plans import Sample
from store import tables
from store.blobs.folder import FolderBlobs
from store.blobs.room import NoRoom, Room
from store.database.db import Database, Transactions
from store.settings import Limits
from tests.rows import run_row, session_row
from tests.scheduler.journal.dying.books import Books, Limit, at_once, wrong
from tests.scheduler.journal.dying.cuts import Cutter, Driver
from tests.search import chance, examples
from tests.servers import PostgresServer

NOW = datetime.now(UTC)
#: A token costs a nano-dollar.
PRICES = load_prices([{"version": "n", "effective_from": NOW.replace(year=2020), "storage_uusd_per_gb_month": 1,
                       "models": {"*": dict.fromkeys(KINDS, 1000)}}])  # fmt: skip
#: The balance, and what may be owed.
WALLETS: dict[str, tuple[int, int | None]] = {"a": (150, 0), "b": (100, 60), "c": (0, None)}
BUDGETS = (
    Limit("a", "project", "p", 90, hard=True),
    Limit("a", "key", "1", 20, hard=False),
    Limit("b", "org", "b", 200, hard=False),
    Limit("c", "key", "2", 120, hard=True),
    Limit("c", "org", "c", 400, hard=True),
)


def open_books() -> Books:
    return Books(
        {org: balance for org, (balance, _) in WALLETS.items()},
        {org: owe for org, (_, owe) in WALLETS.items()},
        [replace(each) for each in BUDGETS],
    )


def open_accounts(session: Session) -> None:
    for org, (balance, owe) in WALLETS.items():
        session.add(tables.Organisation(id=org, name=org, created_at=NOW))
        session.flush()
        session.add(session_row(org, NOW, id=f"s{org}"))
        session.flush()
        session.add(run_row(org, NOW, id=f"s{org}:train:0", session_id=f"s{org}"))
        session.add(
            tables.Sampler(
                id=f"s{org}:sample:0", org_id=org, session_id=f"s{org}", sampling_session_seq_id=0, base_model="m",
                adapter_ref="", kind="base", created_at=NOW,
            )
        )  # fmt: skip
        set_mode(session, org, "unlimited" if owe is None else "prepaid" if owe == 0 else "postpaid", owe or 0)
        if balance:
            ledger.post(session, org_id=org, type="topup", amount_nusd=balance, ref_type="t", ref_id="0")
    for each in BUDGETS:
        set_budget(session, each.org, each.scope, each.scope_id, "total", each.limit, hard=each.hard)  # type: ignore[arg-type]


class Replica:
    """Accepts and settles, with a database of its own."""

    def __init__(self, database: Database, blobs: FolderBlobs) -> None:
        self.database, self._blobs, self._room = database, blobs, Room(blobs.root)
        self._fresh = set[tuple[str, int]]()
        acceptance = Acceptance(database, blobs, PRICES, Limits())
        backlog, answers = Backlog(1 << 30, 1 << 40), Answers(database, blobs)
        self._admission = Admission(acceptance, self._room, backlog, InFlight(), answers, Meters(), self)
        self.recorder = self._recorder(database)

    def leader(self, token: str) -> DatabaseRecorder:
        return self._recorder(Fenced(self.database, token))

    def _recorder(self, database: Transactions) -> DatabaseRecorder:
        answers = Answers(database, self._blobs)
        return DatabaseRecorder(database, self._blobs, PRICES, self._room, answers, Samplers(database))

    async def accept(self, new: NewOperation) -> str:
        with self.database.read() as session:
            taken = known(session, new.lane, new.seq)
        (self._fresh.discard if taken else self._fresh.add)((new.lane, new.seq))
        return await self._admission.accept(new, ())

    def heard(self, op_id: str) -> None:
        """The operation has ended, wherever that was."""
        if (op := self._admission.open.get(op_id)) is not None:
            self._admission.forget(op)

    # ---- `Queues`: a worker finds accepted operations in the database

    async def check(self, new: NewOperation) -> None:
        self.checked = new

    def maybe_stored(self, new: NewOperation) -> bool:
        return (new.lane, new.seq) not in self._fresh

    def put(self, op: Operation) -> None:
        self._fresh.discard((op.lane, op.seq))

    async def adopt(self, request_id: str) -> None:
        self.adopted = request_id

    def skip(self, op: Operation) -> None:
        raise AssertionError("nothing here is refused by the front")


class Program:
    """Random requests, and their answers. `direct` reaches the database without faults."""

    def __init__(
        self, draw: Random, direct: Database, replicas: list[Replica], address: str, blobs: FolderBlobs
    ) -> None:
        self.draw, self.direct, self.replicas, self.address, self._blobs = draw, direct, replicas, address, blobs
        self.asked: list[NewOperation] = []
        self.told: dict[tuple[str, int], str] = {}
        self.refused = set[tuple[str, int]]()
        self.ends: defaultdict[str, list[tuple[bytes | None, int]]] = defaultdict(list)
        self.answers: defaultdict[str, list[tuple[bytes | None, int]]] = defaultdict(list)
        self.terms = 0
        self.leads: list[DatabaseRecorder] = []

    # ---- what is done

    def new(self) -> NewOperation:
        org, number, tokens = self.draw.choice("abc"), len(self.asked), self.draw.choice([5, 20, 20, 33])
        project, key = self.draw.choice([None, "p"]), self.draw.choice([None, 1, 2])
        new = NewOperation(org, f"s{org}", "", number, SAMPLE, "m", tokens, b"{}", project_id=project, key_id=key)
        if self.draw.random() < 0.5:
            new = structs.replace(new, lane=f"s{org}:sample:0", plan=Sample(1, 3, "interactive"))
        else:
            body = f"data {number}".encode()
            new = structs.replace(new, lane=f"s{org}:train:0", kind=OpKind.FORWARD_BACKWARD, body=body)
        self.asked.append(new)
        return new

    async def ask(self, new: NewOperation) -> str | OutOfMoney:
        """Send a request as clients do: again after an error of the server, perhaps to another replica."""
        while True:
            try:
                return await self.draw.choice(self.replicas).accept(new)
            except OutOfMoney as refusal:
                return refusal
            except (NoRoom, OperationalError):
                await asyncio.sleep(0.01)

    async def request(self, new: NewOperation, times: int = 1) -> None:
        """Send a request, several times at the same moment if so drawn."""
        key = new.lane, new.seq
        answers = await asyncio.gather(*(self.ask(new) for _ in range(times)))
        ids = {answer for answer in answers if isinstance(answer, str)}
        assert len(ids) <= 1, "one number, two operations"
        assert not ids or self.told.setdefault(key, *ids) in ids, "a repeat is another operation"
        assert ids or key not in self.told, "a repeat of what was accepted is refused"
        rows = {row[0] for row in self.rows(f"lane = '{new.lane}' AND seq = {new.seq}")}
        assert rows == ids, "what was accepted is not there, or what was refused is"
        if ids:
            self.refused.discard(key)
        else:
            self.refused.add(key)

    async def settle(self, op_id: str, times: int = 1) -> None:
        with self.direct.read() as session:
            row = session.get_one(tables.Operation, op_id)
        await asyncio.gather(*(self._settle(from_row(row), number) for number in range(times)))
        for replica in self.replicas:
            replica.heard(op_id)
        assert self.answers[op_id], "it has ended, and nobody was told how"

    async def _settle(self, op: Operation, number: int) -> None:
        done, cost = self.done(op, number)
        recorder = self.draw.choice(self.replicas).recorder if op.kind == SAMPLE else self.leads[-1]
        end = (done.payload if done.failure is None else None, cost)
        self.ends[op.id].append(end)
        ended = await recorder.record(op, done)
        if ended is not None:
            assert not ended.unrecorded
            self.answers[op.id].append((ended.outcome.payload if ended.outcome.error is None else None, cost))

    def done(self, op: Operation, number: int) -> tuple[Done, int]:
        used = self.draw.randint(4, op.tokens)
        facts = {"prefill": 3, "sample": used - 3} if op.kind == SAMPLE else {"tokens": used}
        match self.draw.randint(0, 5):
            case 0:
                return Done(op.id, failure=Failure("lost", "server"), facts=facts), 0
            case 1:
                return Done(op.id, failure=Failure("your loss", "user", ran=True), facts=facts), used
        return Done(op.id, f"{op.id} {number}".encode(), facts), used

    async def lead(self) -> None:
        """Another replica leads; the previous leader can end nothing any more."""
        self.terms += 1
        token, now = f"t{self.terms}", NOW + timedelta(seconds=100 * self.terms)
        await asyncio.to_thread(self.direct.write_now, lambda session: _need(fence.take(session, token, now)))
        self.leads.append(self.draw.choice(self.replicas).leader(token))
        if len(self.leads) > 1 and (queued := self.rows("state = 'queued' AND kind <> 'sample'")):
            with self.direct.read() as session:
                op = from_row(session.get_one(tables.Operation, self.draw.choice(queued)[0]))
            with pytest.raises(Superseded):
                await self.leads[-2].record(op, self.done(op, 9)[0])
            assert self.rows(f"id = '{op.id}' AND state = 'queued'"), "ended by one that does not lead"

    async def top_up(self) -> None:
        org, number = self.draw.choice("ab"), f"{self.draw.random()}"
        await asyncio.to_thread(
            self.direct.write_now,
            lambda session: ledger.post(session, org_id=org, type="topup", amount_nusd=40, ref_type="t", ref_id=number),
        )

    async def several(self) -> None:
        """Several actions of all kinds at the same moment."""
        if self.draw.random() < 0.3:
            await self.lead()
        works: list[Awaitable[None]] = [
            self.request(self.new(), self.draw.choice([1, 1, 1, 2, 3])) for _ in range(self.draw.randint(1, 5))
        ]
        again = self.draw.sample(self.asked[:-5], min(2, len(self.asked[:-5])))
        works += [self.request(new) for new in again]
        queued = [row[0] for row in self.rows("state = 'queued'")]
        for op_id in self.draw.sample(queued, min(len(queued), self.draw.randint(0, 5))):
            works.append(self.settle(op_id, self.draw.choice([1, 1, 2])))
        works += [self.top_up()] if self.draw.random() < 0.3 else []
        self.draw.shuffle(works)
        looking = asyncio.create_task(self.look())
        await asyncio.gather(*works)
        looking.cancel()

    async def look(self) -> None:
        while True:
            await asyncio.to_thread(self.check)
            await asyncio.sleep(0.05)

    # ---- what must hold

    def rows(self, where: str) -> list[Any]:
        return at_once(self.address, "SELECT id, state FROM operations WHERE " + where + " ORDER BY id")[0]  # noqa: S608

    def check(self) -> None:
        assert wrong(self.address) == {}

    def check_ends(self) -> None:
        """Each operation is billed as it ended, and ended as its clients were told."""
        self.check()
        usage = "SELECT operation_id, SUM(amount_nusd) FROM usage_events GROUP BY operation_id"
        costs = dict(at_once(self.address, usage)[0])
        with self.direct.read() as session:
            ops = list(session.query(tables.Operation))
        assert {op.id for op in ops} == set(self.told.values())
        answers = Answers(self.direct, self._blobs)
        for op in ops:
            if op.state == "queued":
                assert not op.body_ref or self._blobs.get(op.body_ref), "its body is gone"
                assert not self.answers[op.id]
                continue
            stored = answers.stored(op.org_id, op.id)
            found = (stored.payload if stored.error is None else None, int(costs.get(op.id, 0)))  # type: ignore[union-attr]
            assert found in self.ends[op.id]
            assert found[0] in [told for told, _ in self.answers[op.id]]


def _need(so: bool) -> None:
    assert so


# ---- databases, and their faults

Make = Callable[[Random, float], Any]


@pytest.fixture(params=["sqlite", "postgresql"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A program on a new database while the context lasts; connections fail this often."""
    monkeypatch.setattr("scheduler.journal.accepting.acceptance.INSERT_AGAIN_S", (0.01, 0.02))
    monkeypatch.setattr("scheduler.journal.storing.AGAIN_S", (0.01, 0.05))
    blobs = FolderBlobs(tmp_path / "blobs")

    @contextmanager
    def on_sqlite(draw: Random, often: float) -> Iterator[tuple[Program, Driver]]:
        from shutil import copy

        path = copy(request.getfixturevalue("migrated_sqlite"), tmp_path / f"{draw.random()}.db")
        direct, database = Database(f"sqlite:///{path}"), Database(f"sqlite:///{path}")
        direct.write_now(open_accounts)
        driver = Driver(database._write_engine, draw, often)
        yield Program(draw, direct, [Replica(database, blobs)], str(path), blobs), driver
        driver.close()
        database.close()
        direct.close()

    @contextmanager
    def on_postgres(draw: Random, often: float) -> Iterator[tuple[Program, Cutter]]:
        server: PostgresServer = request.getfixturevalue("postgres")
        name = server.create(request.getfixturevalue("migrated_postgres"))
        direct = Database(server.url(name))
        direct.write_now(open_accounts)
        address = f"host=127.0.0.1 port={server.port} user={server.superuser} dbname={name}"
        cutter = Cutter(server.port, address, draw, often)
        url = server.url(name).replace(f":{server.port}/", f":{cutter.port}/")
        databases = [Database(url), Database(url)]
        yield Program(draw, direct, [Replica(each, blobs) for each in databases], address, blobs), cutter
        cutter.often = 0
        for database in (*databases, direct):
            database.close()
        cutter.close()
        server.drop(name)

    return on_sqlite if request.param == "sqlite" else on_postgres


@pytest.mark.search
def test_whatever_dies_the_books_agree(make: Make) -> None:
    draw = chance(1)
    for _ in range(examples(1)):
        seed = draw.getrandbits(64)
        print(f"program {seed}")
        with make(Random(seed), 0.25) as (program, cuts):

            async def story(program: Program = program) -> None:
                await program.lead()
                for _ in range(10):
                    await program.several()

            asyncio.run(story())
            program.check_ends()
            assert {"COMMIT" in cut for cut in cuts.cut} == {True, False}


@pytest.mark.search
def test_one_at_a_time_the_answers_are_those_of_an_oracle(make: Make) -> None:
    draw = chance(2)
    for _ in range(examples(1)):
        seed = draw.getrandbits(64)
        print(f"program {seed}")
        with make(Random(seed), 0.25) as (program, _):
            asyncio.run(one_at_a_time(program, open_books()))
            program.check_ends()


async def one_at_a_time(program: Program, books: Books) -> None:
    draw = program.draw
    await program.lead()
    for _ in range(40):
        queued = [row[0] for row in program.rows("state = 'queued'")]
        if queued and draw.random() < 0.4:
            op_id = draw.choice(queued)
            await program.settle(op_id)
            with program.direct.read() as session:
                row = session.get_one(tables.Operation, op_id)
            books.end(row.org_id, row.project_id, row.key_id, row.hold_nusd, program.answers[op_id][0][1])
        else:
            new = draw.choice(program.asked) if program.asked and draw.random() < 0.2 else program.new()
            key = new.lane, new.seq
            before = key in program.told
            await program.request(new)
            most = new.tokens + (new.kind == SAMPLE)  # its two kinds of tokens are rounded each
            wanted = before or books.accept(new.org_id, new.project_id, new.key_id, most)
            assert (key in program.told) == wanted
        found = at_once(
            program.address,
            "SELECT org_id, balance_nusd, held_nusd FROM wallets",
            "SELECT org_id, scope, scope_id, spent_nusd, held_nusd FROM budgets JOIN budget_periods ON id = budget_id",
        )
        assert set(found[0]) == {(org, books.balance[org], books.held.get(org, 0)) for org in WALLETS}
        assert set(found[1]) == {(each.org, each.scope, each.scope_id, each.spent, each.held) for each in books.limits}
