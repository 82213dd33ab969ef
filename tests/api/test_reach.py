"""The rule of credentials as a table: who may make or touch what."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from api.errors import Forbidden
from api.who.reach import Reach, beyond, permit

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
SOON, LATER = NOW + timedelta(minutes=15), NOW + timedelta(days=30)

OWNER = Reach.of(["admin"], "owner")
ADMIN = Reach.of(["admin"], "admin")
MEMBER = Reach.of(["admin"], "member")
TOKEN = Reach.of(["admin"], "owner", until=SOON)
MONTH = Reach.of(["admin"], "owner", until=LATER)
SAMPLING = Reach.of(["sample"], "member")
BOUND = Reach.of(["admin"], "owner", "evals")

#: A credential, another one, and why the other goes further: written by hand, not computed by the tested code.
TABLE = [
    ("an owner's key, itself", OWNER, OWNER, []),
    ("an owner's key, an admin's", OWNER, ADMIN, []),
    ("an owner's key, one that ends", OWNER, TOKEN, []),
    ("an owner's key, one of a project", OWNER, BOUND, []),
    ("an admin's key, an owner's", ADMIN, OWNER, ["role"]),
    ("an admin's key, an owner's, by another text", ADMIN, Reach.of(["admin"], "-owner"[1:]), ["role"]),
    ("an admin's key, an owner's that only samples", ADMIN, Reach.of(["sample"], "owner"), []),
    ("an admin's key, a member's", ADMIN, MEMBER, []),
    ("an admin's key, the membership of an owner", ADMIN, Reach.of_member("owner"), ["role"]),
    ("an admin's key, the membership of an admin", ADMIN, Reach.of_member("admin"), []),
    ("an admin's key that only trains, their whole key", Reach.of(["train"], "admin"), ADMIN, ["scopes"]),
    ("a member's key, a colleague's of an admin", MEMBER, ADMIN, ["role"]),
    ("a member's key that only samples, itself", SAMPLING, SAMPLING, []),
    ("a member's key that only samples, their whole key", SAMPLING, MEMBER, ["scopes"]),
    ("a member's key of all they may today, of all they may ever", Reach.of(["train"], "member"), MEMBER, ["scopes"]),
    ("a token, the key that it stands for", TOKEN, OWNER, ["expiry"]),
    ("a token, a key that ends later", TOKEN, MONTH, ["expiry"]),
    ("a token, one that ends with it", TOKEN, Reach.of(["train"], "owner", until=SOON), []),
    (
        "a token, one that ends a second later",
        TOKEN,
        Reach.of([], "owner", until=SOON + timedelta(seconds=1)),
        ["expiry"],
    ),
    ("a token, one that ends before it", TOKEN, Reach.of(["train"], "owner", until=NOW), []),
    ("a token, a membership", TOKEN, Reach.of_member("viewer"), ["expiry"]),
    ("a key that ends, itself", MONTH, MONTH, []),
    ("a key that ends, one that does not", MONTH, OWNER, ["expiry"]),
    ("a key of a project, itself", BOUND, BOUND, []),
    ("a key of a project, one of the same, by another text", BOUND, Reach.of(["train"], "owner", "-evals"[1:]), []),
    ("a key of a project, one of another", BOUND, Reach.of(["train"], "owner", "other"), ["project"]),
    ("a key of a project, one of all", BOUND, Reach.of(["train"], "owner"), ["project"]),
    ("a key of a project, a membership", BOUND, Reach.of_member("viewer"), ["scopes", "project"]),
    ("all at once", Reach.of([], "member", "evals", SOON), OWNER, ["scopes", "role", "project", "expiry"]),
]


@pytest.mark.parametrize(("own", "other", "further"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_who_may_touch_what(own: Reach, other: Reach, further: list[str]) -> None:
    assert [text.split(":")[0] for text in beyond(own, other)] == further
    if further:
        with pytest.raises(Forbidden, match=f"you cannot do it, .*{further[0]}: "):
            permit(own, other, "do it")
    else:
        permit(own, other, "do it")


def test_what_is_made_ends_with_its_maker() -> None:
    assert (OWNER.ends_by(LATER), TOKEN.ends_by(LATER), MONTH.ends_by(SOON)) == (LATER, SOON, SOON)


def test_a_detour_over_another_credential_gains_nothing() -> None:
    """If one may make a credential that may make a third, one may make the third directly: a detour gains nothing."""
    reaches = [row[index] for row in TABLE for index in (1, 2)]
    for first in reaches:
        for second in (reach for reach in reaches if not beyond(first, reach)):
            for third in (reach for reach in reaches if not beyond(second, reach)):
                assert not beyond(first, third), (first, second, third)
