from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import delete, update
from sqlalchemy.exc import IntegrityError

from api.routes.people import audit
from store.people.keys import revoke
from store.tables import AuditEntry
from tests.api.conftest import World
from tests.keys import create_key


def entries(world: World, query: str = "", key: str | None = None) -> list[dict[str, Any]]:
    reply = world.get(f"audit{query}", key=key)
    assert reply["truncated"] is False
    return list(reply["entries"])


def events(world: World, query: str = "") -> list[str]:
    return [entry["event"] for entry in entries(world, query)]


def test_what_is_done_is_noted(world: World) -> None:
    session = world.session()
    run = world.run(session)
    path = world.checkpoint(run, 1)
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    world.finish(world.post("load_weights", body)["request_id"])
    world.call("PUT", f"sessions/{session}/project", json={"project_id": "p"})
    world.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    other = world.database.write_now(lambda writing: create_key(writing, "acme"))
    world.database.write_now(lambda writing: revoke(writing, other))
    assert events(world) == [
        "key_created",
        "session_created",
        "checkpoint_created",
        "checkpoint_read",
        "project_created",
        "project_session_assigned",
        "session_finished",
        "key_created",
        "key_revoked",
    ]
    created, read = entries(world, "?event_type=checkpoints")
    assert (created["tinker_path"], created["model_id"]) == (path, run)
    assert created["event_details"]["by"] == "weft:key:1"
    assert (created["event_details"]["size_bytes"], created["event_details"]["session_id"]) == (7, session)
    assert (read["purpose"], read["model_id"]) == ("training", f"{session}:train:1")
    assert events(world, "?event_type=projects") == ["project_created", "project_session_assigned"]
    assert events(world, "?event_type=organizations") == ["key_created", "key_created", "key_revoked"]
    assert events(world, "?event_type=teams") == []
    made = entries(world)[0]["event_details"]
    assert (made["by"], made["target"], made["scopes"]) == ("weft:server", world.key[:12], ["admin"])


def test_a_day_of_one_organisation(world: World) -> None:
    world.session(world.other_key)
    today = datetime.now(UTC).date().isoformat()
    assert events(world, f"?day={today}") == ["key_created"]
    assert events(world, "?day=2026-01-01") == []
    assert events(world, "?day=9999-12-31") == []
    assert events(world, "?day=0001-01-01") == []
    assert len(entries(world, key=world.other_key)) == 2


@pytest.mark.parametrize("query", ["event_type=users", "day=yesterday", "day=2026-02-30"])
def test_mistakes(world: World, query: str) -> None:
    assert query.split("=")[0] in world.get(f"audit?{query}", status=422)["detail"]


@pytest.mark.parametrize("change", [update(AuditEntry).values(event="x"), delete(AuditEntry)], ids=["update", "delete"])
def test_entries_never_change(world: World, change: Any) -> None:
    with pytest.raises(IntegrityError, match="audit_log is append-only"):
        world.database.write_now(lambda writing: writing.execute(change))


def test_a_day_of_more_entries_than_one_answer_holds_is_read_to_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        world.session()
    everything = entries(world)
    monkeypatch.setattr(audit, "MAX_ENTRIES", 2)
    found: list[dict[str, Any]] = []
    for more in (True, True, False):
        reply = world.get(f"audit?offset={len(found)}")
        found += reply["entries"]
        assert reply["truncated"] is more
    assert (len(found), found) == (5, everything)
