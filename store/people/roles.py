"""Roles, and the scopes that each allows. Each key has scopes of its own; a user's key never has more than the user's
role allows, and loses what the role loses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

Scope = Literal["train", "sample", "checkpoints:read", "checkpoints:write", "billing:read", "billing:write", "admin"]
Role = Literal["owner", "admin", "billing-admin", "member", "viewer"]

SCOPES: frozenset[str] = frozenset(get_args(Scope))
ROLES: tuple[str, ...] = get_args(Role)

#: `admin` implies every other scope.
ADMIN = "admin"

#: Scopes about the whole organisation, which a key that is bound to a project never has.
BEYOND_A_PROJECT: frozenset[str] = frozenset({ADMIN, "billing:read", "billing:write"})

ALLOWED: dict[str, frozenset[str]] = {
    "owner": SCOPES,
    "admin": SCOPES,
    "billing-admin": frozenset({"billing:read", "billing:write"}),
    "member": frozenset({"train", "sample", "checkpoints:read", "checkpoints:write"}),
    "viewer": frozenset({"checkpoints:read", "billing:read"}),
}


def effective(role: str, scopes: Iterable[str]) -> frozenset[str]:
    """The scopes that a key given `scopes` has, if its holder has `role`."""
    given = frozenset(scopes)
    return ALLOWED[role] & (SCOPES if ADMIN in given else given)
