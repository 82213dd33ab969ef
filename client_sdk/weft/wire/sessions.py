"""Bodies of finding sessions again: search, projects, trace export, and who asks."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from weft.wire.base import Request, Response, UserMetadata
from weft.wire.service import FinishType

__all__ = [
    "AccessibleSearchOwner",
    "ActiveSessionStatusQuery",
    "AssignProjectRequest",
    "CancelledSessionStatusQuery",
    "ClientFinishedSessionStatusQuery",
    "ClientSessionFinishReason",
    "ClientSessionFinished",
    "FailedSessionStatusQuery",
    "OwnSearchOwner",
    "SearchOwner",
    "SessionActive",
    "SessionCancelled",
    "SessionFailed",
    "SessionFailedReason",
    "SessionFailedRequestReason",
    "SessionFailedSamplingSessionReason",
    "SessionFailedTrainingRunReason",
    "SessionSearchCursor",
    "SessionSearchRequest",
    "SessionSearchResponse",
    "SessionStatus",
    "SessionStatusQuery",
    "SessionSummary",
    "TraceExportResponse",
    "UserSearchOwner",
    "WhoamiResponse",
]


class OwnSearchOwner(Request):
    """The caller's own sessions."""

    type: Literal["own"] = "own"


class AccessibleSearchOwner(Request):
    """Every session that the caller may see."""

    type: Literal["accessible"] = "accessible"


class UserSearchOwner(Request):
    """Sessions of the named users."""

    type: Literal["user"] = "user"
    owner_urns: list[str] = Field(min_length=1, max_length=10)


SearchOwner = Annotated[OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Field(discriminator="type")]


class ActiveSessionStatusQuery(Request):
    type: Literal["active"] = "active"


class CancelledSessionStatusQuery(Request):
    type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(Request):
    type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(Request):
    """Sessions whose client said that it was done, for one of the `reasons` (None: any)."""

    type: Literal["client_finished"] = "client_finished"
    reasons: Annotated[list[FinishType], Field(min_length=1)] | None = None


SessionStatusQuery = Annotated[
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery,
    Field(discriminator="type"),
]


class SessionSearchCursor(Request):
    """The start of the next page: a response's `next_cursor`, handed back as it is."""

    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearchRequest(Request):
    """All conditions must hold, except that one of `session_id` and `display_name` is enough.

    `user_metadata` matches exactly, pair by pair; every word of `display_name` must be in the name, in any case.
    """

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: Annotated[str, Field(min_length=1)] | None = None
    owner: SearchOwner = OwnSearchOwner()
    statuses: Annotated[list[SessionStatusQuery], Field(min_length=1)] | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SessionSearchCursor | None = None


class SessionFailedRequestReason(Response):
    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Response):
    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(Response):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason = Annotated[
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason,
    Field(discriminator="type"),
]


class SessionFailed(Response):
    """One of the session's requests, runs or samplers failed it."""

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


class SessionCancelled(Response):
    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class ClientSessionFinishReason(Response):
    """`type` is a `FinishType`, or imported: the operator brought its weights from elsewhere."""

    type: str


class ClientSessionFinished(Response):
    """The session's client said that it was done."""

    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionActive(Response):
    type: Literal["active"] = "active"


SessionStatus = Annotated[
    SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive, Field(discriminator="type")
]


class SessionSummary(Response):
    """A session as a search shows it. `status` is None if it neither finished nor is known to run."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    checkpoint_storage_bytes: int | None = None
    display_name: str | None = None
    user_metadata: UserMetadata | None = None


class SessionSearchResponse(Response):
    """One page, newest first; `next_cursor` is None on the last."""

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


class AssignProjectRequest(Request):
    project_id: str


class AssignProjectResponse(Response):
    project_id: str


class TraceExportResponse(Response):
    """How far an export is; `url` when it is ready, fetched without credentials."""

    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


class WhoamiResponse(Response):
    """The identity that a token speaks for."""

    user_urn: str
    org_urn: str
    email: str | None = None
