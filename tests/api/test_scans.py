"""No request, no end of an operation and no round of housekeeping reads all rows of a table that only grows: whoever
writes waits meanwhile, and after a year nobody is served. What is asked is explained, not timed."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event

from api.server.housekeeping import reap
from scheduler.jobs.catalogue import JOBS
from scheduler.jobs.registry import JobContext
from store.blobs.folder import FolderBlobs
from store.database import bulk, db, wal
from store.database.db import Database
from store.settings import Settings
from tests.api.conftest import World, open_world
from tests.api.data import batch
from workers.model.card import ModelCard

GROWING = {
    *("sessions", "runs", "samplers", "session_turns", "checkpoints", "operations", "storage_spans"),
    *("usage_events", "usage_hourly", "ledger_entries", "audit_log"),
}
LATER = datetime.now(UTC) + timedelta(days=2)
#: The index of the results that are kept, all of which may be asked for: they go within a day.
KEPT = "INDEX ix_operations_kept"
#: Jobs of every few seconds or minutes.
OFTEN = ("expire_checkpoints", "sweep_results", "budget_alerts")


class Asked:
    """Statements, each with parameters that it once had, as the drivers are given them."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def note(self, statement: str, params: Any) -> None:
        if re.match(r"\s*(SELECT|UPDATE|DELETE|WITH)\b", statement) and "set_config" not in statement:
            self.found.setdefault(statement, params)

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
        """Those that read a growing table as a whole, or all of an index of it."""
        explain = _explained_by_sqlite if database.url.startswith("sqlite") else _explained_by_postgres
        found = explain(database, self.found)
        return [f"{table}: {statement}" for statement, tables in found.items() for table in sorted(tables & GROWING)]


def _explained_by_sqlite(database: Database, asked: dict[str, Any]) -> dict[str, set[str]]:
    path = database.url.removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:
        plans = {
            statement: [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", params)]
            for statement, params in asked.items()
        }
    return {
        statement: {found[1] for step in plan if KEPT not in step and (found := re.match(r"SCAN (\w+)", step))}
        for statement, plan in plans.items()
    }


def _explained_by_postgres(database: Database, asked: dict[str, Any]) -> dict[str, set[str]]:
    """As planned for tables of any size: by an index, where there is one for what is asked."""
    with psycopg.connect(database.url.replace("+psycopg", "")) as connection:
        for way in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin"):
            connection.execute(f"SET {way} = off")  # type: ignore[call-overload]
        return {statement: set(_scanned(_plan(connection, statement, asked[statement]))) for statement in asked}


def _plan(connection: psycopg.Connection[Any], statement: str, params: Any) -> dict[str, Any]:
    query = f"EXPLAIN (FORMAT JSON) {statement}"
    ((plans,),) = connection.execute(query, params or None).fetchall()  # type: ignore[call-overload]
    found: dict[str, Any] = plans[0]["Plan"]
    return found


def _scanned(plan: dict[str, Any]) -> Iterator[str]:
    if "Relation Name" in plan and "Scan" in plan["Node Type"]:
        by_index = "Index Cond" in plan or "Recheck Cond" in plan
        if not by_index:
            yield plan["Relation Name"]
    for part in plan.get("Plans", []):
        yield from _scanned(part)


def live(world: World) -> None:
    """What most tenants do, and what is done for them."""
    session, other = world.session(), world.session()
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
    _sample(world, sampler)
    load = {"model_id": world.run(other), "seq_id": 1, "path": path, "optimizer": True}
    world.finish(world.post("load_weights", load)["request_id"])
    route = f"training_runs/{named.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}"
    for method, of in (("POST", "/publish"), ("PUT", "/ttl"), ("DELETE", "")):
        assert world.call(method, f"{route}{of}", json={"ttl_seconds": 3600}).status_code < 300
    for read in ("training_runs", "checkpoints", "weft/balance", "weft/usage", "weft/ledger", "weft/budgets"):
        world.get(read)
    world.get(f"weft/usage?run_id={run}")
    world.post("session_heartbeat", {"session_id": other})
    world.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})


def _sampler(world: World, session: str, **of: Any) -> str:
    body = {"session_id": session, "sampling_session_seq_id": 20, "type": "create_sampling_session"}
    return str(world.post("create_sampling_session", body | of)["sampling_session_id"])


def _sample(world: World, sampler: str) -> None:
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2},
        "num_samples": 1,
    }
    request_id = world.post("asample", body)["request_id"]
    world.finish(request_id, json.dumps({"sequences": []}).encode(), prefill=2, cached_prefill=0, sample=2)
    world.outcome(request_id)


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


def test_no_table_that_grows_is_read_as_a_whole(
    settings: Settings, card: ModelCard, any_database: Database, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked()
    with open_world(settings, card, any_database, blobs) as world, asked.listening(monkeypatch):
        live(world)
        keep_house(world, settings)
    assert len(asked.found) > 60
    assert asked.scans(any_database) == []
