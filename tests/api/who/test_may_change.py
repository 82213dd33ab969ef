"""Members change what they have made and look at the rest; admins and the organisation's keys change all of it."""

from __future__ import annotations

import re

import pytest

from api.errors import Forbidden, Invalid, NotFound
from api.paths import CheckpointPath
from api.who.may_change import active_session, own_checkpoint, own_operation, own_run, own_session
from api.who.principal import Principal
from store.database.db import Database
from store.tables import Session

ANN = Principal("acme", 1, "ann", role="member")
#: Everybody, and whether they may change what ann has made.
TABLE = [
    (ANN, True),
    (Principal("acme", 7, "ann", role="member"), True),
    (Principal("acme", None, "ann", role="member"), True),
    (Principal("acme", 2, "bob", role="member"), False),
    (Principal("acme", 2, "bob", role="-member"[1:]), False),  # as the database returns it
    (Principal("acme", None, "bob", role="member"), False),
    (Principal("acme", 2, "bob", role="admin"), True),
    (Principal("acme", 2, "bob", role="owner"), True),
    (Principal("acme", 2, "bob", role="zzz"), True),  # scopes alone bound every other role
    (Principal("acme", 2, "bob", role="a role"), True),
    (Principal("acme", 3), True),
]


@pytest.mark.parametrize(("who", "may"), TABLE)
def test_who_changes_what_somebody_has_made(filled: Database, who: Principal, may: bool) -> None:
    path = CheckpointPath("ann-p:run", "weights", "one")
    with filled.read() as session:
        found = [
            lambda: own_session(session, who, "ann-p").id,
            lambda: active_session(session, who, "ann-p").id,
            lambda: own_run(session, who, "ann-p:run").id,
            lambda: own_checkpoint(session, who, path).id,
            lambda: own_operation(session, who, "ann-p:op").id,
        ]
        for find, id in zip(found, ("ann-p", "ann-p", "ann-p:run", "ann-p:checkpoint", "ann-p:op"), strict=True):
            if may:
                assert find() == id
            else:
                with pytest.raises(Forbidden, match=r"ann-p(:op)? is somebody else's, and a member "):
                    find()


@pytest.mark.parametrize("who", [Principal("rival", 9), Principal("acme", 1, "ann", "q", role="member")])
def test_what_is_not_seen_is_not_there_to_be_changed(filled: Database, who: Principal) -> None:
    with filled.read() as session:
        for find in (
            lambda: own_session(session, who, "ann-p"),
            lambda: own_run(session, who, "ann-p:run"),
            lambda: own_checkpoint(session, who, CheckpointPath("ann-p:run", "weights", "one")),
            lambda: own_operation(session, who, "ann-p:op"),
        ):
            with pytest.raises(NotFound):
                find()


@pytest.mark.parametrize("state", ["finished", "expired", "abandoned"])
def test_a_session_that_has_ended_takes_no_work(filled: Database, state: str) -> None:
    filled.write_now(lambda session: setattr(session.get_one(Session, "ann-p"), "state", state))
    with filled.read() as session:
        with pytest.raises(Invalid, match=re.escape(f"session ann-p has ended ({state}): create a new one")):
            active_session(session, ANN, "ann-p")
        assert own_session(session, ANN, "ann-p").state == state
