"""Bodies of managing an organisation: API keys, members, projects, and rate limits of each."""

from __future__ import annotations

from datetime import datetime

from weft.wire.base import Response


class ApiKeyRow(Response):
    """A key without its secret; `prefix` and `last4` are the parts of that which tell keys apart. Without `user_id` it
    is the organisation's own. After a rotation the secret before is good until `previous_expires_at`."""

    id: int
    name: str
    prefix: str
    last4: str
    scopes: list[str]
    user_id: str | None
    project_id: str | None
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None
    previous_expires_at: datetime | None


class ApiKeyWithSecret(ApiKeyRow):
    """A key that was made or rotated just now. `key` is its secret, which no other answer holds."""

    key: str


class ApiKeysResponse(Response):
    keys: list[ApiKeyRow]


class MemberRow(Response):
    """A member of the organisation; `created_at` is when they became one."""

    user_id: str
    email: str
    role: str
    created_at: datetime


class MembersResponse(Response):
    members: list[MemberRow]


class MemberRoleResponse(Response):
    user_id: str
    role: str


class InvitationRow(Response):
    """A link by which one person may become a member with `role`; with `email`, that one alone. `made_by` is the actor
    of the audit log."""

    id: str
    role: str
    email: str | None
    made_by: str
    created_at: datetime
    expires_at: datetime


class InvitationWithLink(InvitationRow):
    """An invitation that was made just now. `link` is what makes a member, and no other answer holds it."""

    link: str


class InvitationsResponse(Response):
    invitations: list[InvitationRow]


class ProjectRow(Response):
    id: str
    name: str
    created_at: datetime
    archived_at: datetime | None


class ProjectsResponse(Response):
    projects: list[ProjectRow]


class RateLimitsRow(Response):
    """The limits (null: none of its own) of an organisation, a project or a key, and how many of its operations are in
    flight now."""

    scope: str
    id: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_in_flight: int | None
    in_flight: int


class RateLimitsResponse(Response):
    limits: list[RateLimitsRow]
