"""Who asks, in the form that every look-up needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import ColumnElement, or_
from sqlalchemy.orm import Session

from api.who.reach import Reach
from api.who.tokens import owner_urn
from scheduler.order.operations import Operation
from store import tables
from store.people.keys import earlier
from store.people.roles import BEYOND_A_PROJECT, SCOPES, effective

#: Statuses of organisations that may do nothing, with any credential.
ENDED = ("suspended", "closed")


@dataclass(frozen=True)
class RateLimit:
    """The most that one key, project or organisation may ask for; `scope` and `id` say which."""

    scope: str
    id: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_in_flight: int | None

    @classmethod
    def of(cls, row: tables.ApiKey | tables.Project | tables.Organisation) -> RateLimit:
        scope = {"api_keys": "key", "projects": "project"}.get(row.__tablename__, "organisation")
        id = f"{row.org_id} {row.id}" if isinstance(row, tables.Project) else str(row.id)
        return cls(scope, id, row.requests_per_minute, row.tokens_per_minute, row.max_in_flight)


@dataclass(frozen=True)
class Principal:
    """Whoever asks. `key_id` is None for a person at the console; `user_id` for a key of the organisation itself,
    whose role is owner: its scopes alone bound it. With `project_id` it works in that project only."""

    org_id: str
    key_id: int | None
    user_id: str | None = None
    project_id: str | None = None
    role: str = "owner"
    scopes: frozenset[str] = SCOPES
    status: str = "active"
    limits: tuple[RateLimit, ...] = field(default=(), compare=False)
    #: The scopes given to the credential, even those that the role does not allow, and the credential's end.
    given: frozenset[str] = SCOPES
    until: datetime | None = None
    #: False if somebody else has been given the secret of a user's key: its actions are then not known to be the
    #: user's.
    in_person: bool = True
    #: For a session of the console: who made the sign-in link that began it; None for the operator.
    link_by: str | None = None

    @property
    def reach(self) -> Reach:
        return Reach.of(self.given, self.role, self.project_id, self.until)

    @property
    def urn(self) -> str:
        return owner_urn(self.key_id) if self.key_id is not None else f"weft:user:{self.user_id}"

    @property
    def actor(self) -> str:
        """The actor's name in the audit log."""
        return f"user:{self.user_id}" if self.user_id is not None and self.in_person else f"key:{self.key_id}"

    def made(self) -> ColumnElement[bool]:
        """The condition for sessions made with this key, or by this user with any key."""
        by_key = tables.Session.key_id == self.key_id
        return by_key if self.user_id is None else or_(by_key, tables.Session.user_id == self.user_id)

    def owns(self, row: tables.Session | tables.Operation | Operation) -> bool:
        """True if this principal owns the session or operation, by the rule of `made`."""
        by_key = self.key_id is not None and row.key_id == self.key_id
        return by_key or (self.user_id is not None and row.user_id == self.user_id)

    @property
    def domain(self) -> str:
        """The name of what it sees: ids derived from a client's retry key are unique within it."""
        return self.org_id if self.project_id is None else f"{self.org_id} {self.project_id}"


def principal_of(session: Session, key: tables.ApiKey | None, until: datetime | None = None) -> Principal | None:
    """The principal of a key; None without a key, or if the key's user has left the organisation. `until` is the end of
    the token or link that stands for the key."""
    if key is None:
        return None
    role = "owner"
    if key.user_id is not None:
        membership = session.get(tables.Membership, (key.org_id, key.user_id))
        if membership is None:
            return None
        role = membership.role
    org = session.get_one(tables.Organisation, key.org_id)
    project = session.get(tables.Project, (key.org_id, key.project_id)) if key.project_id is not None else None
    limited = (org, project, key) if project is not None else (org, key)
    return Principal(
        org_id=key.org_id,
        key_id=key.id,
        user_id=key.user_id,
        project_id=key.project_id,
        role=role,
        scopes=effective(role, key.scopes) - (BEYOND_A_PROJECT if key.project_id is not None else frozenset()),
        status=org.status,
        limits=tuple(RateLimit.of(row) for row in limited),
        given=frozenset(key.scopes),
        until=earlier(key.expires_at, until),
        in_person=key.given_to in (None, f"user:{key.user_id}"),
    )
