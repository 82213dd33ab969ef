"""What sessions have left open when they ended."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy.orm import Session

from scheduler.journal import left
from scheduler.journal.left import waiting_samples
from store.database.db import Database
from store.people.organisations import organisation_named
from store.tables import Operation
from tests.rows import session_row

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def test_the_oldest_samples_of_each_model_are_found_however_many_wait_for_another(
    any_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only samples for models that nobody serves are cancelled: those for a busy model must not hide them."""
    monkeypatch.setattr(left, "SAMPLES", 2)

    def write(session: Session) -> list[tuple[str, str]]:
        org_id = organisation_named(session, "left").id
        for owner, state in (("over", "expired"), ("here", "active")):
            session.add(session_row(org_id, NOW, owner, state=state))
        session.flush()
        asked = [("over", "busy", 5 - age) for age in range(5)] + [("over", "gone", 1), ("here", "gone", 2)]
        for number, (owner, model, age_h) in enumerate(asked):
            columns = {"seq": 0, "kind": "sample", "state": "queued", "tokens": 1, "body_ref": "", "body_sha256": ""}
            at = NOW - timedelta(hours=age_h)
            of = {"org_id": org_id, "session_id": owner, "lane": f"lane-{(4 - number) % 9}", "base_model": model}
            session.add(Operation(id=f"op-{number}", accepted_at=at, plan={}, **of, **columns))
        session.flush()
        return waiting_samples(session, NOW)

    found = any_database.write_now(write)
    assert [op_id for _, op_id in found] == ["op-0", "op-5", "op-1"]
    assert len({org_id for org_id, _ in found}) == 1
