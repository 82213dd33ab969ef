"""The statements that operations cost the database: the same number for any batch; no wallet is written for free work;
PostgreSQL is waited for twice, and finds rows by index."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from sqlalchemy import event

from billing.money.budgets import set_budget
from billing.prices import load_prices
from scheduler.cluster.fence import Fenced, Superseded, take
from scheduler.journal.accepting.acceptance import Taking, insert_all, most_nusd
from scheduler.journal.ending.settlement import Ending, Settlement, result_of
from scheduler.journal.rows import to_row
from scheduler.links.messages import Done
from scheduler.order.operations import SAMPLE, Operation
from scheduler.order.plans import BODY_ONLY, Sample
from store import tables
from store.database.db import Database

NOW = datetime.now(UTC)
PRICES = load_prices()
#: Two for the mark of a commit. Accepting: accounts are read, operations inserted; what costs something sets a wallet.
#: Settling: operations are read and updated; what costs something reads accounts, inserts events, sums and entries, and
#: sets a wallet.
ACCEPTED = {"optim_step": 2 + 2, "forward_backward": 2 + 3}
SETTLED = {"optim_step": 2 + 2, "forward_backward": 2 + 7}


@contextmanager
def written(database: Database) -> Iterator[list[str]]:
    """The statements that SQLite gets from its writer meanwhile, without BEGIN and COMMIT."""
    found: list[str] = []

    def note(statement: str) -> None:
        if not statement.startswith(("BEGIN", "COMMIT")):
            found.append(statement)

    driver = database.write_now(lambda session: session.connection().connection.driver_connection)
    assert isinstance(driver, sqlite3.Connection)
    driver.set_trace_callback(note)
    yield found
    driver.set_trace_callback(None)


def operation(number: int, kind: str) -> Operation:
    tokens = 10 if kind == "forward_backward" else 0
    return Operation(f"op-{number}", "org", "s", "run", number, kind, "m", tokens, "", BODY_ONLY, NOW)


def together(database: Database, batch: Callable[..., Any], items: list[Any]) -> list[Any]:
    """Do `items` in one commit."""

    async def all_at_once() -> list[Any]:
        return list(await asyncio.gather(*(database.write_batched(batch, item, lock="org") for item in items)))

    return asyncio.run(all_at_once())


@pytest.mark.parametrize("many", [1, 20])
@pytest.mark.parametrize("kind", ["optim_step", "forward_backward"])
def test_a_batch_takes_a_fixed_number_of_statements(database: Database, kind: str, many: int) -> None:
    def take(ops: list[Operation]) -> None:
        takings = [Taking(to_row(op, "") | {"hold_nusd": most_nusd(PRICES, op)}) for op in ops]
        assert together(database, insert_all, takings) == [None] * len(ops)

    database.write_now(lambda session: session.add(tables.Organisation(id="org", name="org", created_at=NOW)))
    take([operation(0, kind)])  # makes the wallet
    ops = [operation(1 + number, kind) for number in range(many)]
    with written(database) as accepting:
        take(ops)
    assert len(accepting) == ACCEPTED[kind], accepting
    done = [Done(op.id, b"{}", {"tokens": op.tokens}) for op in ops]
    endings = [Ending(op, end, result_of(op, end), "run") for op, end in zip(ops, done, strict=True)]
    with written(database) as settling:
        assert None not in together(database, Settlement(PRICES).settle, endings)
    assert len(settling) == SETTLED[kind], settling
    moved = [statement for statement in accepting + settling if statement.startswith("UPDATE wallets")]
    assert len(moved) == (2 if kind == "forward_backward" else 0)


# ---- PostgreSQL


def row_named(name: str) -> Operation:
    return Operation(name, "org", "s", "sampler", int(name[2:]), SAMPLE, "m", 32, "", Sample(1, 16, "interactive"), NOW)


async def once(database: Database, settlement: Settlement, op: Operation) -> None:
    """Accept and settle one operation, alone."""
    hold = {"hold_nusd": most_nusd(PRICES, op)}
    assert await database.write_batched(insert_all, Taking(to_row(op, "") | hold), lock="org") is None
    done = Done(op.id, b"{}", {"prefill": 16, "cached_prefill": 0, "sample": 16})
    assert await database.write_batched(settlement.settle, Ending(op, done, result_of(op, done), None), lock="org")


@pytest.fixture
def sent(postgres_database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The statements that the writer sends, trip by trip."""
    trips: list[list[str]] = []
    execute, pipeline = psycopg.Connection.execute, psycopg.Connection.pipeline
    piped = False

    def note(connection: Any, query: str, *rest: Any, **more: Any) -> Any:
        if not piped:
            trips.append([])
        trips[-1].append(query)
        return execute(connection, query, *rest, **more)

    @contextmanager
    def together(connection: Any) -> Iterator[Any]:
        nonlocal piped
        with pipeline(connection) as opened:
            trips.append([])
            piped = True
            try:
                yield opened
            finally:
                piped = False

    def plain(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        trips.append([statement])

    monkeypatch.setattr(psycopg.Connection, "execute", note)
    monkeypatch.setattr(psycopg.Connection, "pipeline", together)
    event.listen(postgres_database._write_engine, "before_cursor_execute", plain)
    yield trips
    event.remove(postgres_database._write_engine, "before_cursor_execute", plain)


def test_an_operation_takes_two_trips_each_way(postgres_database: Database, sent: list[list[str]]) -> None:
    """One trip asks, under the locks; the other writes and commits."""
    database, settlement = postgres_database, Settlement(PRICES)
    database.write_now(lambda session: session.add(tables.Organisation(id="org", name="org", created_at=NOW)))
    asyncio.run(once(database, settlement, row_named("op1")))  # makes the wallet
    sent.clear()
    asyncio.run(once(database, settlement, row_named("op2")))
    found = [[statement.split()[0] for statement in trip] for trip in sent]
    writes = ["WITH", "COMMIT"]
    assert found == [["BEGIN", "SELECT", "SELECT"], writes, ["BEGIN", "SELECT", "SELECT", "SELECT"], writes]


def test_a_leader_sees_that_it_leads_with_what_it_asks_anyway(
    postgres_database: Database, sent: list[list[str]]
) -> None:
    database, settlement = postgres_database, Settlement(PRICES)
    database.write_now(lambda session: session.add(tables.Organisation(id="org", name="org", created_at=NOW)))
    database.write_now(lambda session: take(session, "leader", NOW))
    op = row_named("op1")
    hold = {"hold_nusd": most_nusd(PRICES, op)}
    asyncio.run(database.write_batched(insert_all, Taking(to_row(op, "") | hold), lock="org"))
    done = Done(op.id, b"{}", {"prefill": 16, "cached_prefill": 0, "sample": 16})
    ending = Ending(op, done, result_of(op, done), None)
    sent.clear()
    with pytest.raises(Superseded):
        asyncio.run(Fenced(database, "one before").write_batched(settlement.settle, ending, lock="org"))
    assert [statement for trip in sent for statement in trip if statement.startswith(("WITH", "COMMIT"))] == []
    sent.clear()
    assert asyncio.run(Fenced(database, "leader").write_batched(settlement.settle, ending, lock="org"))
    found = [[statement.split()[0] for statement in trip] for trip in sent]
    assert found == [["BEGIN", "SELECT", "SELECT", "SELECT", "SELECT"], ["WITH", "COMMIT"]]


def test_rows_are_found_by_index_in_tables_that_were_just_made(
    postgres_database: Database, sent: list[list[str]]
) -> None:
    """A plan is made once. If it is made for an almost empty table it holds while thousands of rows come, until
    statistics are taken; so it may not read a whole table, by itself or by all of an index."""
    database = postgres_database
    database.write_now(lambda session: session.add(tables.Organisation(id="org", name="org", created_at=NOW)))
    database.write_now(lambda session: set_budget(session, "org", "org", "org", "month", 10**12))
    sent.clear()
    asyncio.run(once(database, Settlement(PRICES), row_named("op1")))
    lock = next(statement for trip in sent for statement in trip if "set_config('enable_seqscan'" in statement)
    asked = {
        statement
        for trip in sent
        for statement in trip
        if statement.startswith(("WITH", "SELECT wallets", "SELECT op"))
    }
    assert len(asked) == 4
    with psycopg.connect(database.url.replace("+psycopg", "")) as connection:
        connection.execute(lock, (["org"],))  # type: ignore[call-overload]
        scans = [scan for statement in asked for scan in _scans(_generic_plan(connection, statement))]
    assert {"operations", "wallets", "budget_periods"} <= {scan["Relation Name"] for scan in scans}
    assert [scan for scan in scans if "Index Cond" not in scan and "Recheck Cond" not in scan] == []


def _generic_plan(connection: psycopg.Connection[Any], statement: str) -> dict[str, Any]:
    names: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        return f"${names.setdefault(found.group(1) or str(len(names)), len(names) + 1)}"

    numbered = re.sub(r"%(?:\((\w+)\))?s", number, statement)
    connection.execute(f"PREPARE asked AS {numbered}")  # type: ignore[call-overload]
    nothing = ", ".join(["NULL"] * len(names))
    query = f"EXPLAIN (FORMAT JSON) EXECUTE asked({nothing})"
    ((plans,),) = connection.execute(query).fetchall()  # type: ignore[call-overload]
    connection.execute("DEALLOCATE asked")
    found: dict[str, Any] = plans[0]["Plan"]
    return found


def _scans(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a plan that read tables."""
    if "Relation Name" in plan and "Scan" in plan["Node Type"]:
        yield plan
    for part in plan.get("Plans", []):
        yield from _scans(part)
