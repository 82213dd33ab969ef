"""No request, no end of an operation and no round of housekeeping reads all rows of a growing table, and no write reads
all rows of one organisation: other writers would wait, and after a year nobody would be served. The queries' plans are
examined, not their time."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, select

from api.server.housekeeping import reap
from billing.metering.quotas import stored_bytes
from billing.money.grants import expire, take
from billing.money.ledger import refund_operation
from billing.payments.meters import change_mode, put_into_outbox
from billing.payments.sender import claim
from billing.payments.summaries import unclear
from billing.prices import load_prices
from scheduler.jobs.catalogue import JOBS
from scheduler.jobs.registry import JobContext
from scheduler.journal.ending.references import in_use
from scheduler.journal.ending.results import forget_samples
from store.blobs.folder import FolderBlobs
from store.database import bulk, db, wal
from store.database.db import Database
from store.settings import Settings
from store.tables import Operation, Wallet
from tests.api.conftest import World, open_world
from tests.api.data import batch
from tests.api.test_custom_loss import body as loss
from workers.model.card import ModelCard

GROWING = {
    *("sessions", "runs", "samplers", "session_turns", "checkpoints", "operations", "storage_spans"),
    *("usage_events", "usage_hourly", "ledger_entries", "audit_log", "stripe_outbox", "budget_alerts"),
}
LATER = datetime.now(UTC) + timedelta(days=2)
#: Indexes that may be read as a whole, because rows soon leave them: results are kept for a day, meter events stay open
#: until Stripe has them.
KEPT = ("INDEX ix_operations_kept", "INDEX ix_stripe_outbox_open")
#: Jobs that run every few seconds or minutes.
OFTEN = ("expire_checkpoints", "sweep_results", "budget_alerts")
#: The index is searched for nothing but the organisation. In SQLite's words: PostgreSQL chooses an index by statistics.
OF_ALL = "(org_id=?)"
#: Nor for nothing more than that an operation is queued.
QUEUED = "ix_operations_state_lane (state=?)"


class Asked:
    """Statements, each with parameters that it once had, as the driver got them."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.written: set[str] = set()

    def note(self, statement: str, params: Any) -> None:
        if re.match(r"\s*(SELECT|UPDATE|DELETE|WITH)\b", statement) and "set_config" not in statement:
            self.found.setdefault(statement, params)
            if threading.current_thread().name == "database-writer":
                self.written.add(statement)

    @contextmanager
    def listening(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        def by_sqlalchemy(_of: Any, _cursor: Any, statement: str, params: Any, _context: Any, many: bool) -> None:
            self.note(statement, params[0] if many else params)

        def by_us(connection: Connection, statement: str, params: Any = ()) -> list[Any]:
            self.note(statement, params)
            return execute(connection, statement, params)

        def by_psycopg(connection: Any, query: Any, params: Any = None, **more: Any) -> Any:
            self.note(str(query), params)
            return execute_postgres(connection, query, params, **more)

        execute, execute_postgres = wal.execute, psycopg.Connection.execute
        event.listen(Engine, "before_cursor_execute", by_sqlalchemy)
        try:
            with monkeypatch.context() as patch:
                for module in (bulk, db):
                    patch.setattr(module, "execute", by_us)
                patch.setattr(psycopg.Connection, "execute", by_psycopg)
                yield
        finally:
            event.remove(Engine, "before_cursor_execute", by_sqlalchemy)

    def scans(self, database: Database) -> list[str]:
        """Statements that read all of a growing table, or of an index of it; in a write, all of an organisation."""
        explain = _explained_by_sqlite if database.url.startswith("sqlite") else _explained_by_postgres
        found = []
        for statement, steps in explain(database, self.found).items():
            newest = "LIMIT" in statement and "ORDER BY" in statement  # the wanted rows are at the end of the index
            for table, by in steps:
                of_org = statement in self.written and not newest and by.endswith(OF_ALL)
                if table in GROWING and (not by or of_org):
                    found.append(f"{table}: {statement}")
        return found


#: The steps of a statement's plan: each a table, and by which column rows are found. "": all rows are read.
Steps = dict[str, list[tuple[str, str]]]


def _explained_by_sqlite(database: Database, asked: dict[str, Any]) -> Steps:
    path = database.url.removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:
        plans = {
            statement: [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", params)]
            for statement, params in asked.items()
        }
    return {
        statement: [
            (found[2], "" if found[1] == "SCAN" else step)
            for step in plan
            if not any(kept in step for kept in KEPT) and (found := re.match(r"(SCAN|SEARCH) (\w+)", step))
        ]
        for statement, plan in plans.items()
    }


def _explained_by_postgres(database: Database, asked: dict[str, Any]) -> Steps:
    """The plan for tables of any size: by an index, if there is one for the query."""
    with psycopg.connect(database.url.replace("+psycopg", "")) as connection:
        for way in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin"):
            connection.execute(f"SET {way} = off")  # type: ignore[call-overload]
        return {statement: list(_steps(_plan(connection, statement, asked[statement]))) for statement in asked}


def _plan(connection: psycopg.Connection[Any], statement: str, params: Any) -> dict[str, Any]:
    query = f"EXPLAIN (FORMAT JSON) {statement}"
    ((plans,),) = connection.execute(query, params or None).fetchall()  # type: ignore[call-overload]
    found: dict[str, Any] = plans[0]["Plan"]
    return found


def _steps(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "Relation Name" in plan and "Scan" in plan["Node Type"]:
        yield plan["Relation Name"], plan.get("Index Cond") or plan.get("Recheck Cond") or ""
    for part in plan.get("Plans", []):
        yield from _steps(part)


def live(world: World) -> None:
    """What most tenants do, and what the server does for them."""
    session, other = world.session(), world.session()
    world.post("create_custom_loss", loss(session))
    run = world.run(session)
    world.finish(world.train(batch(run, 1))["request_id"], b"x", tokens=3)
    world.finish(world.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}})["request_id"], b"{}")
    path = world.checkpoint(run, 3, "one")
    over = {"model_id": run, "seq_id": 4, "path": "one", "overwrite": True, "ttl_seconds": 3600}
    world.finish(world.post("save_weights", over)["request_id"], size_bytes=7)
    for seq, kind in ((5, "inflight"), (6, "inflight"), (7, "snapshot")):
        body = {"model_id": run, "seq_id": seq, "sampling_session_seq_id": seq, "kind": kind}
        world.finish(world.post("save_weights_for_sampler", body)["request_id"], size_bytes=7)
    named = world.checkpoint(run, 8, "two", sampler=True)
    sampler = _sampler(world, session, model_path=named)
    sampled = _sample(world, sampler)
    world.database.write_now(lambda db: refund_operation(db, db.get_one(Operation, sampled).org_id, sampled))
    load = {"model_id": world.run(other), "seq_id": 1, "path": path, "optimizer": True}
    world.finish(world.post("load_weights", load)["request_id"])
    route = f"training_runs/{named.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}"
    for method, of in (("POST", "/publish"), ("PUT", "/ttl"), ("DELETE", "")):
        assert world.call(method, f"{route}{of}", json={"ttl_seconds": 3600}).status_code < 300
    for read in ("training_runs", "checkpoints", "weft/balance", "weft/usage", "weft/ledger", "weft/budgets"):
        world.get(read)
    world.get(f"weft/usage?run_id={run}")
    pay(world)
    world.post("session_heartbeat", {"session_id": other})
    world.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})


def pay(world: World) -> None:
    """Limits on money, set by anybody who may, and an operator's commands."""
    key_id = world.get("weft/keys")["keys"][0]["id"]
    for scope, scope_id in (("org", None), ("key", str(key_id))):
        for period in ("month", "total"):
            body = {"scope": scope, "scope_id": scope_id, "period": period, "limit_nusd": 10**12}
            made = world.call("PUT", "weft/budgets", json=body)
            assert made.status_code == 200, made.text
            assert world.call("DELETE", f"weft/budgets/{made.json()['id']}").status_code == 200
    with world.database.read() as reading:
        org_id = reading.scalars(select(Wallet.org_id)).first()
    for work in (
        lambda db: take(db, org_id, 1, "by mistake"),
        lambda db: change_mode(db, org_id, "postpaid", 0, LATER),
        lambda db: put_into_outbox(db, org_id, "cus_1", LATER),
    ):
        world.database.write_now(work)
    expire(world.database, LATER)


def _sampler(world: World, session: str, **of: Any) -> str:
    body = {"session_id": session, "sampling_session_seq_id": 20, "type": "create_sampling_session"}
    return str(world.post("create_sampling_session", body | of)["sampling_session_id"])


def _sample(world: World, sampler: str) -> str:
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2},
        "num_samples": 1,
    }
    request_id = str(world.post("asample", body)["request_id"])
    world.finish(request_id, json.dumps({"sequences": []}).encode(), prefill=2, cached_prefill=0, sample=2)
    world.outcome(request_id)
    return request_id


def keep_house(world: World, settings: Settings) -> None:
    async def rounds() -> None:
        await world.service.liveness.flush()
        await world.service.last_used.flush()
        await world.service.fetched.flush()
        await reap(world.service, LATER)

    world.http.portal.call(rounds)  # type: ignore[union-attr]
    service = world.service
    context = JobContext(world.database, service.blobs, settings, service.prices, lambda: LATER)
    for name in OFTEN:
        JOBS[name].run(context)
    world.database.write_now(lambda session: claim(session, LATER, 8))
    with world.database.read() as session:
        unclear(session, LATER)


def test_no_table_that_grows_is_read_as_a_whole(
    settings: Settings, card: ModelCard, any_database: Database, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    with open_world(settings, card, any_database, blobs) as world, asked.listening(monkeypatch):
        live(world)
        keep_house(world, settings)
    assert len(asked.found) > 60
    assert asked.scans(any_database) == []


def test_samples_to_forget_are_found_among_all_that_ended(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    with asked.listening(monkeypatch):
        forget_samples(database, LATER)
    ((_, by),) = [step for found in _explained_by_sqlite(database, asked.found).values() for step in found]
    assert "ix_operations_samples" in by


def test_alerts_of_budgets_that_are_over_are_found_among_those_that_are_shown(
    settings: Settings, database: Database, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    with asked.listening(monkeypatch):
        JOBS["budget_alerts"].run(JobContext(database, blobs, settings, load_prices(), lambda: LATER))
    steps = [step for found in _explained_by_sqlite(database, asked.found).values() for step in found]
    by = {by for table, by in steps if table == "alerts" and "ref=?" not in by}
    assert by == {"SEARCH alerts USING INDEX ix_alerts_open (kind=?)"}


def test_who_saves_or_deletes_reads_nothing_of_what_else_is_queued(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    with asked.listening(monkeypatch):
        database.write_now(lambda session: (in_use(session, "weights/one"), stored_bytes(session, "a")))
    steps = [by for found in _explained_by_sqlite(database, asked.found).values() for table, by in found]
    assert len(steps) > 8
    assert [by for by in steps if by.endswith(QUEUED)] == []
