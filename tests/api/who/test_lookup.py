"""A request finds what it names only within its organisation, and with a project's key only within that project. Rows
of organisations that sort before and after must not be mistaken for theirs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from api.errors import Invalid, NotFound
from api.paths import CheckpointPath
from api.who import lookup
from api.who.principal import Principal
from store import tables
from store.database.db import Database
from store.people.keys import new_key
from tests.api.who.conftest import SESSIONS, checkpoint_row

ALL = {id: (org_id, project) for org_id, project, id, _, _ in SESSIONS}
#: Everybody, and the sessions that they see.
SEEN = [
    (Principal("acme", 3), {"ann-p", "bob-p", "ann-q", "key-none"}),
    (Principal("acme", 1, "ann", role="member"), {"ann-p", "bob-p", "ann-q", "key-none"}),
    (Principal("acme", 1, "ann", "p"), {"ann-p", "bob-p"}),
    (Principal("acme", 1, "ann", "q"), {"ann-q"}),
    (Principal("acme", 1, "ann", "none"), set()),
    (Principal("rival", 9), {"rival-p"}),
    (Principal("rival", 9, project_id="p"), {"rival-p"}),
    (Principal("rival", 9, project_id="q"), set()),
    (Principal("nobody", 9), set()),
]
TABLES = {
    tables.Session: "",
    tables.Run: ":run",
    tables.Sampler: ":sampler",
    tables.Operation: ":op",
    tables.Checkpoint: ":checkpoint",
}


@pytest.mark.parametrize(("who", "seen"), SEEN)
def test_each_is_found_by_those_who_see_it_alone(filled: Database, who: Principal, seen: set[str]) -> None:
    found: dict[str, Callable[[Any, str], Any]] = {
        "": lambda session, id: lookup.session_by_id(session, who, id),
        ":run": lambda session, id: lookup.run_by_id(session, who, id),
        ":sampler": lambda session, id: lookup.sampler_by_id(session, who, id),
        ":op": lambda session, id: lookup.operation_by_id(session, who, id),
    }
    with filled.read() as session:
        for table, suffix in TABLES.items():
            rows = session.scalars(select(table.id).where(lookup.visible(who, table)))  # type: ignore[attr-defined,arg-type]
            assert {str(id).removesuffix(suffix) for id in rows} == seen, table
        for id in ALL:
            for suffix, find in found.items():
                if id in seen:
                    assert find(session, id + suffix).id == id + suffix
                else:
                    with pytest.raises(NotFound, match=f"no .* '{id}{suffix}'"):
                        find(session, id + suffix)
            path = CheckpointPath(f"{id}:run", "weights", "one")
            for find_at in (lookup.checkpoint_at, lookup.readable_checkpoint):
                if id in seen:
                    assert find_at(session, who, path).id == f"{id}:checkpoint"
                else:
                    with pytest.raises(NotFound, match=f"no checkpoint {path}"):
                        find_at(session, who, path)


def test_a_request_that_is_not_found_is_named_in_the_answer(filled: Database) -> None:
    with filled.read() as session, pytest.raises(NotFound) as caught:
        lookup.operation_by_id(session, Principal("rival", 9), "ann-p:op")
    assert caught.value.request_id == "ann-p:op"


@pytest.mark.parametrize(
    ("id", "may"),
    [
        ("x" * 255, True),
        ("x" * 256, True),
        ("x" * 257, False),
        ("x" * 300, False),
        ("\u00e9", False),
        ("a\x00b", False),
        ("a\nb", False),
    ],
)
def test_what_cannot_be_an_id_is_not_looked_for(id: str, may: bool) -> None:
    assert lookup.plain_id(id) == may

    class Asked(Exception):
        pass

    class Rows:
        def get(self, *_: Any) -> None:
            raise Asked

    for find in (lookup.session_by_id, lookup.run_by_id, lookup.sampler_by_id, lookup.operation_by_id):
        with pytest.raises(Asked if may else NotFound):
            find(Rows(), Principal("acme", 1), id)  # type: ignore[arg-type]


def test_a_path_is_of_one_run_kind_and_name(filled: Database) -> None:
    def write(session: Any) -> None:
        session.add(checkpoint_row("acme", "two", "ann-p:run", "two"))
        session.add(checkpoint_row("acme", "sampler", "ann-p:run", "one", kind="sampler_weights"))

    filled.write_now(write)
    who = Principal("acme", 3)
    with filled.read() as session:
        for kind, name, id in (("weights", "one", "ann-p:checkpoint"), ("weights", "two", "two")):
            path = CheckpointPath("ann-p:run", kind, name)
            assert (
                lookup.checkpoint_at(session, who, path).id == lookup.readable_checkpoint(session, who, path).id == id
            )
        path = CheckpointPath("ann-p:run", "sampler_weights", "one")
        assert lookup.readable_checkpoint(session, who, path).id == "sampler"


@pytest.mark.parametrize(("after_s", "over"), [(None, False), (-60, True), (60, False)])
def test_what_has_expired_is_not_there(filled: Database, after_s: float | None, over: bool) -> None:
    expires_at = datetime.now(UTC) + timedelta(seconds=after_s) if after_s is not None else None

    def write(session: Any) -> None:
        session.get_one(tables.Checkpoint, "ann-p:checkpoint").expires_at = expires_at

    filled.write_now(write)
    path = CheckpointPath("ann-p:run", "weights", "one")
    with filled.read() as session:
        row = session.get_one(tables.Checkpoint, "ann-p:checkpoint")
        assert lookup.expired(row) == over
        live = session.scalars(select(tables.Checkpoint.id).where(lookup.live_checkpoints())).all()
        assert (row.id not in live) == over
        for find in (lookup.checkpoint_at, lookup.readable_checkpoint):
            if over:
                with pytest.raises(NotFound):
                    find(session, Principal("acme", 3), path)
            else:
                assert find(session, Principal("acme", 3), path).id == row.id


@pytest.mark.parametrize(("ticks", "over"), [(-1, True), (0, True), (1, False)])
def test_at_its_end_it_is_over(filled: Database, monkeypatch: pytest.MonkeyPatch, ticks: int, over: bool) -> None:
    now = datetime(2026, 11, 20, tzinfo=UTC)
    end = now + ticks * timedelta(microseconds=1)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return now

    monkeypatch.setattr(lookup, "datetime", Clock)
    filled.write_now(lambda session: setattr(session.get_one(tables.Checkpoint, "ann-p:checkpoint"), "expires_at", end))
    with filled.read() as session:
        row = session.get_one(tables.Checkpoint, "ann-p:checkpoint")
        assert lookup.expired(row) == over
        live = session.scalars(select(tables.Checkpoint.id).where(lookup.live_checkpoints())).all()
        assert (row.id not in live) == over


def test_what_is_published_is_read_by_all_and_found_by_its_own(filled: Database) -> None:
    filled.write_now(lambda session: setattr(session.get_one(tables.Checkpoint, "ann-p:checkpoint"), "public", True))
    path = CheckpointPath("ann-p:run", "weights", "one")
    with filled.read() as session:
        for who in (Principal("rival", 9), Principal("acme", 1, "ann", "q")):
            row = lookup.readable_checkpoint(session, who, path)
            assert lookup.run_of(session, row).id == "ann-p:run"
            with pytest.raises(NotFound):
                lookup.checkpoint_at(session, who, path)


@pytest.mark.parametrize("scopes", [["train"], ["sample"], ["checkpoints:read"], ["admin"], ["billing:read"], []])
def test_a_key_that_is_sent_along_lends_what_it_reads(filled: Database, scopes: list[str]) -> None:
    secret = filled.write_now(lambda session: new_key(session, "acme", scopes=scopes, project_id="p")[1])
    rival = Principal("rival", 9)
    lends = scopes not in (["billing:read"], [])
    with filled.read() as session:
        if not lends:
            with pytest.raises(Invalid, match="weights_access_token: not an API key of this server that may read"):
                lookup.readable_checkpoint(session, rival, CheckpointPath("ann-p:run", "weights", "one"), secret)
            return
        row = lookup.readable_checkpoint(session, rival, CheckpointPath("ann-p:run", "weights", "one"), secret)
        assert row.id == "ann-p:checkpoint"
        own = CheckpointPath("rival-p:run", "weights", "one")
        assert lookup.readable_checkpoint(session, rival, own, secret).id == "rival-p:checkpoint"
        with pytest.raises(NotFound):  # the lender's key is for another project
            lookup.readable_checkpoint(session, rival, CheckpointPath("ann-q:run", "weights", "one"), secret)


def test_what_is_no_key_lends_nothing(filled: Database) -> None:
    with filled.read() as session, pytest.raises(Invalid, match="not an API key"):
        lookup.readable_checkpoint(
            session, Principal("rival", 9), CheckpointPath("rival-p:run", "weights", "one"), "tml-x"
        )


def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    cards: Any = {"one": "its card", "another": "another card"}
    assert lookup.served_model(cards, "one") is cards["one"]
    with pytest.raises(Invalid, match="teacher: 'two' is not served here; this server has another, one"):
        lookup.served_model(cards, "two", "teacher")
