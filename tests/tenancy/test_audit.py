"""The audit log: it has every change, written in the transaction of the change, and nobody can alter it unseen."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.orm import Session

from store.database import audit
from store.database.audit import Verdict
from store.database.caller import OPERATOR, acting_as
from store.database.db import Database
from store.people import organisations
from store.tables import AuditEntry, Organisation
from tests.api.conftest import World
from tests.forked import Forked
from tests.keys import create_key
from tests.tenancy.conftest import org_id_of

NOW = datetime(2026, 11, 20, tzinfo=UTC)


def make_org(database: Database, *names: str) -> None:
    for name in names:
        row = Organisation(id=name, name=name, created_at=NOW)
        database.write_now(lambda session, row=row: session.add(row))


def note(org_id: str, target: str = "t") -> Callable[[Session], None]:
    return lambda session: audit.record(session, org_id=org_id, key_id=None, event="x_y", target=target)


def verdict(database: Database, org_id: str, head: str | None = None) -> Verdict:
    with database.read() as session:
        return audit.verify(session, org_id, head)


def tamper(database: Database, *statements: str) -> None:
    """Alter the log as somebody could who may switch the triggers off."""
    with create_engine(database.url).begin() as connection:
        _unprotect(connection)
        for statement in statements:
            connection.execute(text(statement))


def _unprotect(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("ALTER TABLE audit_log DISABLE TRIGGER USER"))
    else:
        connection.execute(text("DROP TRIGGER audit_log_no_update"))
        connection.execute(text("DROP TRIGGER audit_log_no_delete"))


def test_a_chain_of_each_organisation(any_database: Database) -> None:
    make_org(any_database, "a", "b")
    for n in range(5):
        any_database.write_now(note("ab"[n % 2], f"{n} ü"))
    assert [(verdict(any_database, org).entries, verdict(any_database, org).problems) for org in "ab"] == [
        (3, ()),
        (2, ()),
    ]
    assert verdict(any_database, "nobody") == Verdict(0, "", ())
    # An empty head, as given by a script that has not found the file with it.
    assert "is gone" in verdict(any_database, "a", "").problems[0]


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE audit_log SET target = 'other' WHERE target = '1'", "was changed"),
        ("UPDATE audit_log SET at = '2020-01-01 00:00:00+00:00' WHERE target = '1'", "was changed"),
        ("UPDATE audit_log SET actor = 'user:x' WHERE target = '0'", "was changed"),
        ("DELETE FROM audit_log WHERE target = '1'", "put in or taken out"),
        ("DELETE FROM audit_log WHERE target = '0'", "put in or taken out"),
        ("DELETE FROM audit_log WHERE target = '2'", "the end of the log was cut off"),
    ],
)
def test_tampering_shows(any_database: Database, statement: str, problem: str) -> None:
    make_org(any_database, "a")
    for n in range(3):
        any_database.write_now(note("a", str(n)))
    head = verdict(any_database, "a").head
    assert verdict(any_database, "a", head).problems == ()
    tamper(any_database, statement)
    assert problem in "; ".join(verdict(any_database, "a", head).problems)


def test_a_change_that_fails_leaves_no_row(any_database: Database) -> None:
    make_org(any_database, "a")

    def half(session: Session) -> None:
        note("a")(session)
        raise KeyError

    with pytest.raises(KeyError):
        any_database.write_now(half)
    assert verdict(any_database, "a").entries == 0


WRITER = """
import sys
from store.database import audit
from store.database.db import Database
database = Database(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for n in range(60):
    for org in sys.argv[2]:
        database.write_now(lambda s: audit.record(s, org_id=org, key_id=None, event="x_y", target=str(n)))
database.close()
"""


def test_writers_in_several_processes_never_fork_the_chain(any_database: Database) -> None:
    """Each process takes the organisations in another order: no two may wait for each other."""
    make_org(any_database, "a", "b")
    writers = [Forked("-c", WRITER, any_database.url, order) for order in ("ab", "ba", "ab")]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.close()
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    for org in "ab":
        found = verdict(any_database, org)
        assert (found.entries, found.problems) == (180, ())


def test_an_entry_says_who_from_where_and_which_request(any_world: World) -> None:
    any_world.post("weft/projects", {"name": "p"})
    org_id = org_id_of(any_world)
    with acting_as(OPERATOR):
        any_world.database.write_now(lambda session: create_key(session, "acme"))
    with any_world.database.read() as session:
        rows = list(session.query(AuditEntry).filter_by(org_id=org_id).order_by(AuditEntry.id))
    assert [(row.event, row.actor, row.key_id, row.ip) for row in rows] == [
        ("key_created", "server", None, None),
        ("project_created", "key:1", 1, "testclient"),
        ("key_created", "operator", None, None),
    ]
    assert rows[1].request_id
    assert verdict(any_world.database, org_id).problems == ()


def test_every_change_is_in_the_log(any_world: World) -> None:
    """The entries of AdminClient's audit() keep their form."""
    world = any_world
    user_id = world.post("weft/members", {"email": "Ann@example.com", "role": "owner"})["user_id"]
    world.post("weft/members", {"email": "bob@example.com", "role": "owner"})
    project = world.post("weft/projects", {"name": "p"})["id"]
    changes: list[tuple[str, str, Any]] = [
        ("PUT", f"weft/members/{user_id}", {"role": "viewer"}),
        ("DELETE", f"weft/members/{user_id}", None),
        ("PATCH", f"weft/projects/{project}", {"name": "q", "archived": True}),
        ("PATCH", f"weft/projects/{project}", {"archived": False}),
        ("POST", "weft/keys", {}),
        ("POST", "weft/keys/3/rotate", {}),
        ("PUT", "weft/rate_limits/key/3", {"max_in_flight": 4}),
        ("DELETE", "weft/keys/3", None),
    ]
    for method, path, body in changes:
        reply = world.call(method, path, json=body)
        assert reply.is_success, reply.text
    entries = world.get("audit")["entries"]
    assert [entry["event"] for entry in entries] == [
        "key_created",
        "member_added",
        "member_added",
        "project_created",
        "member_role_set",
        "member_removed",
        "project_renamed",
        "project_archived",
        "project_restored",
        "key_created",
        "key_rotated",
        "limits_set",
        "key_revoked",
    ]
    assert {entry["event_details"]["by"] for entry in entries[1:]} == {"weft:key:1"}
    assert [e["event"] for e in world.get("audit?event_type=teams")["entries"]][-1] == "member_removed"


def test_the_last_owner_stays(any_database: Database) -> None:
    make_org(any_database, "a")
    ann = any_database.write_now(lambda session: organisations.add_member(session, "a", "ann@example.com", "owner").id)
    bob = any_database.write_now(lambda session: organisations.add_member(session, "a", "bob@example.com", "member").id)
    for change in (
        lambda session: organisations.change_role(session, "a", ann, "admin"),
        lambda session: organisations.remove_member(session, "a", ann),
    ):
        with pytest.raises(organisations.PeopleError, match="the last owner"):
            any_database.write_now(change)
    any_database.write_now(lambda session: organisations.change_role(session, "a", bob, "owner"))
    any_database.write_now(lambda session: organisations.remove_member(session, "a", ann))
    with any_database.read() as session:
        assert [(user.id, row.role) for row, user in organisations.members(session, "a")] == [(bob, "owner")]
