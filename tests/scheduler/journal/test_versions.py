"""What the database says of a run's policy."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.journal.versions import policy_of, version_at
from scheduler.links.messages import PolicyMoved
from store import tables
from store.db import Database
from tests.scheduler.journal.test_journal import organisation

NOW = datetime.now(UTC)


@pytest.fixture
def database(any_database: Database) -> Database:
    organisation(SimpleNamespace(database=any_database))  # type: ignore[arg-type]
    return any_database


def store(database: Database, run_id: str, *operations: tuple[str, str, dict[str, Any]]) -> None:
    """Operations of a run: (kind, state, plan)."""

    def put(session: Any) -> None:
        for seq, (kind, state, plan) in enumerate(operations):
            session.add(
                tables.Operation(
                    id=f"{run_id}-{seq}", org_id="org", session_id="s", lane=run_id, seq=seq, kind=kind, base_model="m",
                    state=state, tokens=1, body_ref="", body_sha256="", plan=plan, accepted_at=NOW,
                )
            )  # fmt: skip

    database.write_now(put)


STEP = ("optim_step", "done", {})


def test_steps_count_from_where_the_optimizer_comes(database: Database) -> None:
    refused, queued = ("optim_step", "failed", {}), ("optim_step", "queued", {})
    store(database, "fresh", ("create", "done", {}), STEP, refused, STEP, ("save_state", "done", {}), STEP, queued)
    source = {"source_ref": "weights/fresh-4", "path": "tinker://fresh/weights/a"}
    store(database, "resumed", ("create", "done", source | {"with_optimizer": True}), STEP)
    store(database, "copied", ("create", "done", source | {"with_optimizer": False}), STEP)
    store(database, "back", ("create", "done", {}), STEP, ("load_state", "done", source | {"with_optimizer": True}))
    store(database, "lost", ("create", "done", {"source_ref": "weights/gone", "with_optimizer": True}), STEP)
    with database.read() as session:
        found = {name: policy_of(session, name, "s").version for name in ("fresh", "resumed", "copied", "back", "lost")}
        assert found == {"fresh": 3, "resumed": 3, "copied": 1, "back": 2, "lost": 1}
        assert [version_at(session, "fresh", seq) for seq in range(7)] == [0, 1, 1, 2, 2, 3, 3]
        assert policy_of(session, "fresh", "s") == PolicyMoved("fresh", 3, "", 5)
        assert policy_of(session, "new", "s") == PolicyMoved("new", 0, "", -1)
