"""The policy version of a run, by the database."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from scheduler.journal.samples.versions import policy_of, version_at
from scheduler.links.messages import PolicyMoved, RunSpec
from scheduler.order.plans import BODY_ONLY, Create, Load, Plan, Save, Source
from store import tables
from store.database.db import Database
from tests.scheduler.journal.kit import organisation

NOW = datetime.now(UTC)


@pytest.fixture
def database(any_database: Database) -> Database:
    organisation(SimpleNamespace(database=any_database))  # type: ignore[arg-type]
    return any_database


def store(database: Database, run_id: str, *operations: tuple[str, str, Plan]) -> None:
    """Operations of a run: (kind, state, plan)."""

    def put(session: Any) -> None:
        for seq, (kind, state, plan) in enumerate(operations):
            session.add(
                tables.Operation(
                    id=f"{run_id}-{seq}", org_id="org", session_id="s", lane=run_id, seq=seq, kind=kind, base_model="m",
                    state=state, tokens=1, body_ref="", body_sha256="", plan=msgspec.to_builtins(plan), accepted_at=NOW,
                )
            )  # fmt: skip

    database.write_now(put)


SPEC = RunSpec("s:train:0", "m", 8, 32.0, 0, train_attn=True, train_mlp=True, train_unembed=True)
STEP = ("optim_step", "done", BODY_ONLY)


def create(source: Source | None = None) -> tuple[str, str, Plan]:
    return "create", "done", Create(SPEC, "interactive", source)


def test_steps_count_from_where_the_optimizer_comes(database: Database) -> None:
    refused, queued = ("optim_step", "failed", BODY_ONLY), ("optim_step", "queued", BODY_ONLY)
    saved = ("save_state", "done", Save("weights", "a"))
    store(database, "fresh", create(), STEP, refused, STEP, saved, STEP, queued)
    whole = Source("weights/fresh-4", "tinker://fresh/weights/a", with_optimizer=True)
    store(database, "resumed", create(whole), STEP)
    store(database, "copied", create(replace(whole, with_optimizer=False)), STEP)
    store(database, "back", create(), STEP, ("load_state", "done", Load(whole)))
    store(database, "lost", create(replace(whole, ref="weights/gone")), STEP)
    with database.read() as session:
        found = {name: policy_of(session, name, "s").version for name in ("fresh", "resumed", "copied", "back", "lost")}
        assert found == {"fresh": 3, "resumed": 3, "copied": 1, "back": 2, "lost": 1}
        assert [version_at(session, "fresh", seq) for seq in range(7)] == [0, 1, 1, 2, 2, 3, 3]
        assert policy_of(session, "fresh", "s") == PolicyMoved("fresh", 3, "", 5)
        assert policy_of(session, "new", "s") == PolicyMoved("new", 0, "", -1)
