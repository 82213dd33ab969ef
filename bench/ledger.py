"""What it costs to hold and settle money: operations per second on SQLite and PostgreSQL, and milliseconds of a sample.

    python bench/ledger.py [--json] [--quick]

- `settled_per_s`: operations that are accepted with a hold and settled with their usage, ledger entry, hourly sums,
  wallet and budget moved, each answered after its commit, through the database's one writer as in the service: by
  asynchronous clients that keep that many operations in flight. `split` gives accepting and settling each alone.
- `one_at_a_time_ms`: the same with one operation in flight: two commits that nothing shares.
- `added_ms`: what holds and charges add to an operation: the time of the whole path, less that of the same path with
  the rows of the operation alone; with many in flight, and with one.
- `sample_ms`: a sample of 32 tokens from a tiny model through a real server on this machine, for comparison.

Times are the best of many short rounds, the sample's too, because others use the machine meanwhile. PostgreSQL is a
throw-away cluster as the tests start it, with its fsync off: what is measured is our work, not the disk's; statistics
are taken after each round, as autovacuum does. Milliseconds of processor time (`cpu_ms`, `added_cpu_ms`) are this
process's alone.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import tinker
from sqlalchemy import insert, text, update
from sqlalchemy.orm import Session
from tinker import types

from bench.parts.results import asked, at_least, claim, machine, tell
from bench.parts.serving import BASE_MODEL, make_key, serve
from billing.money import ledger
from billing.money.budgets import set_budget
from billing.money.wallets import set_mode
from billing.prices import load_prices
from billing.reports.reconcile import check
from migrations.upgrade import migrate
from scheduler.journal.accepting.acceptance import Taking, insert_all
from scheduler.journal.ending.settlement import Ending, Settlement
from scheduler.journal.rows import to_row
from scheduler.links.messages import Done
from scheduler.order.operations import SAMPLE, Operation, Outcome
from scheduler.order.plans import Sample
from store import tables
from store.database.db import Database
from tests.servers import postgres_server

ORG = "bench"
IN_FLIGHT = 256
FACTS = {"prefill": 100, "cached_prefill": 0, "sample": 32}


@contextmanager
def databases() -> Iterator[dict[str, Database]]:
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, postgres_server() as postgres:
        urls = {"sqlite": f"sqlite:///{folder}/weft.db", "postgresql": postgres.url(postgres.create())}
        opened = {name: Database(url) for name, url in urls.items()}
        for database in opened.values():
            migrate(database)
            database.write_now(set_up)
        yield opened
        for database in opened.values():
            database.close()


def set_up(session: Session) -> None:
    """A prepaid organisation with a budget, and a key with another."""
    session.add(tables.Organisation(id=ORG, name=ORG, created_at=datetime.now(UTC)))
    session.flush()
    set_mode(session, ORG, "prepaid", 0)
    ledger.post(session, org_id=ORG, type="topup", amount_nusd=10**15, ref_type="bench", ref_id="1")
    set_budget(session, ORG, "org", ORG, "month", 10**15)
    set_budget(session, ORG, "key", "1", "month", 10**15)


def analyze(session: Session) -> None:
    """Have PostgreSQL take statistics of the operations, so that statements are planned for as many as there are."""
    session.execute(text("ANALYZE operations"))


def new_operation() -> Operation:
    number = uuid.uuid4()
    return Operation(
        id=number.hex,
        org_id=ORG,
        session_id="session",
        lane="sampler",
        seq=number.int >> 65,
        kind=SAMPLE,
        base_model="model",
        tokens=132,
        body_ref="",
        plan=Sample(1, 100, "interactive"),
        accepted_at=datetime.now(UTC),
        key_id=1,
    )


def row_of(op: Operation, hold_nusd: int) -> dict[str, Any]:
    return to_row(op, op.body_sha256) | {"hold_nusd": hold_nusd}


class WithMoney:
    """Accepts and settles as the journal does."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._settlement = Settlement(load_prices())

    async def accept(self, op: Operation) -> None:
        await self._database.write_batched(insert_all, Taking(row_of(op, 26_000)), lock=ORG)

    async def settle(self, op: Operation) -> None:
        ending = Ending(op, Done(op.id, facts=FACTS), Outcome(b""), "run")
        await self._database.write_batched(self._settlement.settle, ending, lock=ORG)


class WithoutMoney:
    """The same commits with only the operations' own rows."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def accept(self, op: Operation) -> None:
        await self._database.write_batched(self._insert, row_of(op, 0), lock="")

    async def settle(self, op: Operation) -> None:
        await self._database.write_batched(self._end, op.id, lock="")

    def _insert(self, session: Session, rows: list[Any]) -> list[None]:
        session.execute(insert(tables.Operation), rows)
        return [None for _ in rows]

    def _end(self, session: Session, ids: list[Any]) -> list[None]:
        values = [{"id": op_id, "state": "done", "finished_at": datetime.now(UTC)} for op_id in ids]
        session.execute(update(tables.Operation), values)
        return [None for _ in ids]


async def timed(ops: list[Operation], work: Callable[[Operation], Awaitable[None]], in_flight: int) -> float:
    """Seconds until `work` is done for all, with `in_flight` at a time."""
    waiting = iter(ops)

    async def client() -> None:
        for op in waiting:
            await work(op)

    start = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(in_flight)])
    return time.perf_counter() - start


async def path_s(path: WithMoney | WithoutMoney, count: int, in_flight: int) -> dict[str, float]:
    """Seconds per operation to accept, to settle, and for both together; and processor seconds to do the first two."""
    ops = [new_operation() for _ in range(count)]
    cpu_s = time.process_time()
    accept_s = await timed(ops, path.accept, in_flight)
    settle_s = await timed(ops, path.settle, in_flight)
    cpu_s = time.process_time() - cpu_s

    async def both(op: Operation) -> None:
        await path.accept(op)
        await path.settle(op)

    both_s = await timed([new_operation() for _ in range(count)], both, in_flight)
    return {"accept": accept_s / count, "settle": settle_s / count, "both": both_s / count, "cpu": cpu_s / count}


async def measure(database: Database, count: int, rounds: int) -> dict[str, Any]:
    """The best of many short rounds, with and without money in turn, because others use this machine too."""
    best: dict[tuple[str, int], dict[str, float]] = {}
    for _ in range(rounds):
        for path in (WithMoney(database), WithoutMoney(database)):
            for in_flight, times in ((IN_FLIGHT, count), (1, count // 20)):
                found = await path_s(path, times, in_flight)
                known = best.setdefault((type(path).__name__, in_flight), found)
                for name, seconds in found.items():
                    known[name] = min(known[name], seconds)
        if database.url.startswith("postgresql"):
            database.write_now(analyze)
    drifts = check(database)
    assert not drifts, drifts
    many, one = best["WithMoney", IN_FLIGHT], best["WithMoney", 1]
    bare_many, bare_one = best["WithoutMoney", IN_FLIGHT], best["WithoutMoney", 1]
    return {
        "settled_per_s": 1 / many["both"],
        "split": {"accepted_per_s": 1 / many["accept"], "settled_per_s": 1 / many["settle"]},
        "one_at_a_time_ms": 1e3 * one["both"],
        "added_ms": {"many": 1e3 * (many["both"] - bare_many["both"]), "one": 1e3 * (one["both"] - bare_one["both"])},
        "cpu_ms": {"many": 1e3 * many["cpu"], "one": 1e3 * one["cpu"]},
        "added_cpu_ms": {"many": 1e3 * (many["cpu"] - bare_many["cpu"]), "one": 1e3 * (one["cpu"] - bare_one["cpu"])},
    }


def sample_ms(times: int) -> float:
    """Milliseconds of a sample of 32 tokens from a prompt of 100, over HTTP."""
    with serve() as (url, data_dir):
        client = tinker.ServiceClient(base_url=url, api_key=make_key(data_dir, "bench"))
        sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
        prompt = types.ModelInput.from_ints([20 + i % 300 for i in range(100)])
        params = types.SamplingParams(max_tokens=32, stop=[], seed=1)
        taken = []
        for _ in range(times + 1):
            start = time.perf_counter()
            sampler.sample(prompt, 1, params).result()
            taken.append(time.perf_counter() - start)
    return 1e3 * min(taken[1:])


def main() -> None:
    args = asked(__doc__, quick="fewer operations").parse_args()
    count, rounds = 2000, 2 if args.quick else 12
    with databases() as opened:
        found = {name: asyncio.run(measure(database, count, rounds)) for name, database in opened.items()}
    sample = sample_ms(10 if args.quick else 40)
    claims = []
    for name, figures in found.items():
        rate, added, alone = figures["settled_per_s"], figures["added_ms"]["many"], figures["added_ms"]["one"]
        claims.append(at_least(f"{name}: operations accepted and settled per second", rate, 2000))
        claims.append(claim(f"{name}: milliseconds added to one of many operations", added, 1.0, added < 1.0))
        claims.append(claim(f"{name}: milliseconds added to an operation alone", alone, 1.0, alone < 1.0))
        claims.append(claim(f"{name}: share of a sample's time, alone", alone / sample, 0.02, alone / sample < 0.02))
    result = {
        "bench": "ledger",
        "compares": "operations with holds and charges against their rows alone, each answered after its commit",
        "machine": machine(),
        "in_flight": IN_FLIGHT,
        **found,
        "sample_ms": sample,
        "claims": claims,
    }
    tell(result, args)


if __name__ == "__main__":
    main()
