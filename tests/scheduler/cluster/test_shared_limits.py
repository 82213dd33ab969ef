"""The counts of what is in flight, as the database tells them to every replica."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from scheduler.cluster.shared_limits import in_flight as found
from scheduler.journal.accepting.backlog import Backlog
from scheduler.journal.accepting.in_flight import Elsewhere, InFlight
from scheduler.order.operations import NewOperation
from store import tables
from store.database.db import Database
from tests.scheduler.journal.kit import organisation


def test_samples_and_runs_count_once_for_their_key_project_and_organisation(any_database: Database) -> None:
    organisation(SimpleNamespace(database=any_database))  # type: ignore[arg-type]
    rows = [
        ("sample", "one", 0, "queued", 7), ("sample", "one", 1, "queued", 8), ("sample", "one", 2, "done", 7),
        ("create", "run", 0, "done", 7), ("forward", "run", 1, "queued", 7), ("forward", "run", 2, "queued", 7),
    ]  # fmt: skip

    def put(session: Any) -> None:
        for number, (kind, lane, seq, state, key_id) in enumerate(rows):
            session.add(
                tables.Operation(
                    id=f"op{number}", org_id="org", session_id="s", lane=lane, seq=seq, kind=kind, base_model="m",
                    state=state, tokens=1, body_ref="", body_sha256="", plan={}, accepted_at=datetime.now(UTC),
                    key_id=key_id, project_id="p" if key_id == 7 else None,
                )
            )  # fmt: skip

    any_database.write_now(put)
    in_flight = InFlight(lambda *asked: asyncio.to_thread(found, any_database, *asked))

    def work(lane: str, kind: str) -> NewOperation:
        return NewOperation("org", "s", lane, 9, kind, "m", 1, key_id=7, project_id="p")

    def elsewhere(scope: tuple[str, str], work: NewOperation | None = None) -> Elsewhere:
        return asyncio.run(in_flight.elsewhere(*scope, work))

    scopes = [("organisation", "org"), ("project", "org p"), ("key", "7"), ("key", "8"), ("project", "other p")]
    assert [elsewhere(scope).count for scope in scopes] == [3, 2, 2, 1, 0]
    assert [elsewhere(scope, work("run", "forward")).has for scope in scopes] == [True, True, True, False, False]
    assert elsewhere(("organisation", "org"), work("one", "sample")) == Elsewhere(3)
    with in_flight.arriving(work("new run", "create")):
        assert in_flight.has("key", "7", work("new run", "forward"))
        assert in_flight.count("key", "9") == 0


def test_a_backlog_counts_what_others_have() -> None:
    backlog = Backlog(5, 100)
    backlog.hear([{"org": (2, 20)}, {"org": (1, 10), "other": (9, 9)}])
    backlog.take("org", 30)
    assert (backlog.of("org"), backlog.own()) == ((4, 60), {"org": (1, 30)})
    backlog.hear([])
    backlog.release("org", 30)
    assert (backlog.of("org"), backlog.own()) == ((0, 0), {})
