"""Two organisations of `api.who`'s lookups: acme with the projects p and q and the members ann and bob, and rival."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from store import tables
from store.database.db import Database
from tests.rows import run_row, session_row

NOW = datetime.now(UTC)


def sampler_row(org_id: str, id: str, session_id: str, run_id: str) -> tables.Sampler:
    row = tables.Sampler(id=id, org_id=org_id, session_id=session_id, run_id=run_id, kind="snapshot", created_at=NOW)
    row.sampling_session_seq_id, row.base_model, row.adapter_ref = 0, "m", ""
    return row


def operation_row(org_id: str, id: str, session_id: str, lane: str, **columns: Any) -> tables.Operation:
    usual = {"seq": 1, "kind": "forward", "base_model": "m", "state": "queued", "tokens": 0, "hold_nusd": 0}
    usual |= {"body_ref": "", "body_sha256": "", "plan": {}, "accepted_at": NOW}
    return tables.Operation(id=id, org_id=org_id, session_id=session_id, lane=lane, **usual | columns)


def checkpoint_row(org_id: str, id: str, run_id: str, name: str = "one", **columns: Any) -> tables.Checkpoint:
    usual = {"kind": "weights", "ref": f"weights/{id}", "size_bytes": 1, "public": False, "user_metadata": {}}
    return tables.Checkpoint(id=id, org_id=org_id, run_id=run_id, name=name, created_at=NOW, **usual | columns)


#: (organisation, project, id, key that made it, user)
SESSIONS = [
    ("acme", "p", "ann-p", 1, "ann"),
    ("acme", "p", "bob-p", 2, "bob"),
    ("acme", "q", "ann-q", 1, "ann"),
    ("acme", None, "key-none", 3, None),
    ("rival", "p", "rival-p", 9, "ann"),
]


@pytest.fixture
def filled(database: Database) -> Database:
    """Each session has a run, a sampler, an operation and a checkpoint `one`, named after it."""

    def write(session: Any) -> None:
        for name in ("acme", "rival"):
            session.add(tables.Organisation(id=name, name=name, created_at=NOW))
        for name in ("ann", "bob"):
            session.add(tables.User(id=name, email=f"{name}@example.com", created_at=NOW))
        session.flush()
        for org_id in ("acme", "rival"):
            for name in ("p", "q"):
                session.add(tables.Project(org_id=org_id, id=name, name=name, created_at=NOW))
        for org_id, project, id, key_id, user_id in SESSIONS:
            session.add(session_row(org_id, NOW, id, project_id=project, key_id=key_id, user_id=user_id))
            session.flush()
            session.add(run_row(org_id, NOW, f"{id}:run", id))
            session.add(sampler_row(org_id, f"{id}:sampler", id, f"{id}:run"))
            session.add(operation_row(org_id, f"{id}:op", id, f"{id}:run", key_id=key_id, user_id=user_id))
            session.flush()
            session.add(checkpoint_row(org_id, f"{id}:checkpoint", f"{id}:run"))

    database.write_now(write)
    return database
