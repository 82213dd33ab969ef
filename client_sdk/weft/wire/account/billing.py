"""Bodies of an administrator's questions: audit log, usage by the hour, stored bytes. The shapes are Tinker's.

Amounts here are floats of US dollars because the protocol says so; Weft's own, exact amounts are in
`weft.wire.account.usage`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from weft.wire.base import Request, Response, UserMetadata

__all__ = [
    "AuditEventType",
    "AuditLogEntry",
    "AuditLogResponse",
    "BillingEventInfo",
    "BillingUsageEvent",
    "BillingUsageResponse",
    "BillingUsageSession",
    "CheckpointBillingEvent",
    "CurrentCheckpointStorageUsageItem",
    "CurrentCheckpointStorageUsageResponse",
    "GetBillingUsageRequest",
    "SamplingPrefillBillingEvent",
    "SamplingSampleBillingEvent",
    "StorageBillingEvent",
    "TrainingBillingEvent",
]

AuditEventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditLogEntry(Response):
    """What happened, `<resource>_<action>`, and in `event_details` who did it to what."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any] = Field(default_factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(Response):
    """`truncated`: the day has more entries than one answer holds; ask again with `offset`."""

    entries: list[AuditLogEntry]
    truncated: bool = False


class GetBillingUsageRequest(Request):
    """A window of at most 14 days, both ends on the hour in UTC; the end is not part of it."""

    starting_on: datetime
    ending_before: datetime


class TrainingBillingEvent(Response):
    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(Response):
    """Prompt tokens; `cached` ones were not computed again and cost less."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Response):
    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(Response):
    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(Response):
    type: Literal["storage"] = "storage"
    free: bool = False
    gigabyte_hours: float


BillingEventInfo = Annotated[
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent,
    Field(discriminator="type"),
]


class BillingUsageEvent(Response):
    """What was used in one hour by one session of one model, and its estimated cost."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageSession(Response):
    user_metadata: UserMetadata | None = None


class BillingUsageResponse(Response):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = Field(default_factory=dict)
    cost_data_through: datetime | None = None


class CurrentCheckpointStorageUsageItem(Response):
    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(Response):
    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]
