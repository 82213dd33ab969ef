from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.people.keys import new_key
from store.people.organisations import add_member
from store.tables import AuditEntry, Operation, Organisation
from store.tables.work import MAX_NOTES
from tests.api.conftest import World


def entries(world: World) -> list[AuditEntry]:
    with world.database.read() as session:
        return list(session.scalars(select(AuditEntry).filter_by(event="run_notes_set")))


def test_kept_replaced_and_taken_away(world: World) -> None:
    run = world.run()
    path = f"weft/runs/{run}/notes"
    assert world.get(path) == {"notes": ""}
    for given, kept in ((" warmup was too short\r\n<b>x</b> ", "warmup was too short\r\n<b>x</b>"), ("", "")):
        for _ in range(2):  # the same note again changes nothing
            assert world.call("PUT", path, json={"notes": given}).json() == {"notes": kept}
        assert world.get(path) == {"notes": kept}
    first, second = entries(world)
    assert (first.target, first.detail) == (run, {"characters": len("warmup was too short\r\n<b>x</b>")})
    assert second.detail == {"characters": 0}


def test_limits(world: World) -> None:
    path = f"weft/runs/{world.run()}/notes"
    assert world.call("PUT", path, json={"notes": "x" * MAX_NOTES}).status_code == 200
    long = world.call("PUT", path, json={"notes": "x" * (MAX_NOTES + 1)})
    assert long.status_code == 400
    assert f"notes: {MAX_NOTES + 1} characters, the limit is {MAX_NOTES}" in long.json()["detail"]
    assert world.call("PUT", path, json={"notes": "a\0b"}).status_code == 400
    assert world.call("PUT", path, json={"note": "x"}).status_code == 422
    assert world.get(path) == {"notes": "x" * MAX_NOTES}


def test_whose_runs(world: World) -> None:
    """Colleagues read notes; a member writes only about their own runs; other organisations find nothing."""
    run = world.run()
    path = f"weft/runs/{run}/notes"

    def member(session: Session) -> str:
        org_id = session.scalars(select(Organisation.id).filter_by(name="acme")).one()
        user = add_member(session, org_id, "m@acme.example", "member")
        return new_key(session, org_id, user_id=user.id)[1]

    key = world.database.write_now(member)
    assert world.call("PUT", path, json={"notes": "x"}, key=key).status_code == 403
    assert world.get(path, key=key) == {"notes": ""}
    for method in ("PUT", "GET"):
        assert world.call(method, path, json={"notes": "x"}, key=world.other_key).status_code == 404
    assert entries(world) == []


def test_steps_keep_what_their_optimizer_got(world: World) -> None:
    run = world.run()
    body = {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": 3e-4}}
    request = world.post("optim_step", body)["request_id"]
    with world.database.read() as session:
        settings = session.get_one(Operation, request).plan["settings"]
    assert settings["learning_rate"] == 3e-4
    assert settings["beta2"] == 0.95, "as the client left it"
