"""Usage by the hour, storage included, and what is stored now, in the shapes of Tinker's AdminClient.

Its amounts are floats of dollars. They are the ledger's integers divided once, so rounding them to nine digits gives
the ledger's nano-dollars back.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import AwareDatetime
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from weft.wire.account.billing import (
    BillingEventInfo,
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
    CheckpointBillingEvent,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    StorageBillingEvent,
    TrainingBillingEvent,
)

from api.checks.runs import check_text
from api.checks.times import check_utc
from api.errors import Invalid
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.state.service import ServiceDep
from api.who.lookup import live_checkpoints
from api.who.session_search import DEFAULT_PROJECT, text_values
from api.who.tokens import owner_urn
from billing.metering.hourly import HOUR, CheckpointRow, GroupRow, UsageGroup, checkpoint_rows, hour_of, usage_rows
from billing.prices import ANY_MODEL, STORAGE
from store import tables

router = APIRouter(prefix="/api/v1/billing/usage")

LONGEST_WINDOW = timedelta(days=14)
NUSD_PER_USD = 10**9
UUSD_PER_USD = 10**6
BYTES_PER_GB = 10**9


@router.get("/events", response_model_exclude_unset=True, **declare(scope="billing:read", limit="call"))
async def usage_events(
    service: ServiceDep,
    who: PrincipalDep,
    starting_on: Annotated[AwareDatetime, Query()],
    ending_before: Annotated[AwareDatetime, Query()],
) -> BillingUsageResponse:
    """The organisation's usage in a window, by hour, type, model, session and user, exact as of now."""
    start, end = _window(starting_on, ending_before)

    def read(session: Session) -> BillingUsageResponse:
        used = usage_rows(session, who.org_id, start, end)
        saves = checkpoint_rows(session, who.org_id, start, end)
        ids = {row.group.session_id for row in used} | {row.session_id for row in saves if row.session_id}
        facts = _sessions(session, ids)
        events = [_usage_event(row, facts) for row in used] + [_save_event(row, facts) for row in saves]
        known = sorted(ids & facts.keys())
        return BillingUsageResponse(
            data=sorted(events, key=lambda event: event.bucket_start),
            sessions={name: BillingUsageSession(user_metadata=facts[name].metadata or None) for name in known},
            cost_data_through=None,  # no invoice reprices what the ledger says
        )

    return await service.read(read)


@router.get("/checkpoints/current", **declare(scope="billing:read", limit="call"))
async def current_checkpoints(
    service: ServiceDep, who: PrincipalDep, project_id: str | None = None
) -> CurrentCheckpointStorageUsageResponse:
    """What is stored now, by project and owner."""
    check_text(project_id, "project_id", 64)
    rate_usd = service.prices.rate(ANY_MODEL, STORAGE, datetime.now(UTC)).uusd / UUSD_PER_USD

    def read(session: Session) -> CurrentCheckpointStorageUsageResponse:
        run, owner, saved = tables.Run, tables.Session, tables.Checkpoint
        group = (owner.project_id, owner.key_id)
        query = select(*group, func.count(), func.sum(saved.size_bytes)).select_from(saved)
        query = query.join(run, run.id == saved.run_id).join(owner, owner.id == run.session_id)
        query = query.where(saved.org_id == who.org_id, live_checkpoints()).group_by(*group)
        if project_id is not None:
            query = query.where(owner.project_id == (None if project_id == DEFAULT_PROJECT else project_id))
        rows = session.execute(query).all()
        names = _key_names(session, {key_id for _, key_id, _, _ in rows if key_id is not None})
        items = [
            CurrentCheckpointStorageUsageItem(
                project_id=project,
                org_user_urn=owner_urn(key_id) if key_id is not None else None,
                user_name=names.get(key_id),
                checkpoint_count=count,
                size_bytes=int(size or 0),
                size_gigabytes=int(size or 0) / BYTES_PER_GB,
                estimated_monthly_cost_usd=int(size or 0) / BYTES_PER_GB * rate_usd,
            )
            for project, key_id, count, size in rows
        ]
        items.sort(key=lambda item: (-item.size_bytes, item.project_id or "", item.org_user_urn or ""))
        return CurrentCheckpointStorageUsageResponse(effective_rate_usd_per_gigabyte_month=rate_usd, data=items)

    return await service.read(read)


def _window(starting_on: datetime, ending_before: datetime) -> tuple[datetime, datetime]:
    start, end = check_utc(starting_on, "starting_on"), check_utc(ending_before, "ending_before")
    for name, at in (("starting_on", start), ("ending_before", end)):
        if at != hour_of(at):
            raise Invalid(f"{name}: must be on the hour in UTC, got {at.isoformat()}")
    if start > datetime.now(UTC):
        raise Invalid(f"starting_on: must not be in the future, got {start.isoformat()}")
    if not timedelta(0) < end - start <= LONGEST_WINDOW:
        raise Invalid(f"ending_before: must be after starting_on and at most 14 days later, got {end.isoformat()}")
    return start, end


class _Facts:
    """What a bill says of a session."""

    def __init__(self, row: tables.Session, user_name: str | None) -> None:
        self.metadata = text_values(row.user_metadata)
        self.envelope = {
            "user_id": owner_urn(row.key_id) if row.key_id is not None else None,
            "user_name": user_name,
            "session_id": row.id,
            "project_id": row.project_id,
        }


def _sessions(session: Session, ids: Iterable[str]) -> dict[str, _Facts]:
    rows = list(_in_parts(session, tables.Session, ids))
    names = _key_names(session, {row.key_id for row in rows if row.key_id is not None})
    return {row.id: _Facts(row, names.get(row.key_id)) for row in rows}


def _in_parts(session: Session, table: type[tables.Session], ids: Iterable[str]) -> Iterable[tables.Session]:
    """Rows by id, a part at a time: databases limit the parameters of a statement."""
    wanted = list(ids)
    for start in range(0, len(wanted), 500):
        yield from session.scalars(select(table).where(table.id.in_(wanted[start : start + 500])))


def _key_names(session: Session, key_ids: set[int]) -> dict[int | None, str]:
    """Keys by the part of them that may be shown."""
    query = select(tables.ApiKey.id, tables.ApiKey.prefix).where(tables.ApiKey.id.in_(key_ids))
    return {key_id: prefix for key_id, prefix in session.execute(query)}


def _usage_event(row: GroupRow, facts: dict[str, _Facts]) -> BillingUsageEvent:
    group = row.group
    per = "gigabyte_month" if group.kind == STORAGE else "million_tokens"
    return BillingUsageEvent(
        **_envelope(group.hour, group.base_model, facts.get(group.session_id), group.session_id),
        **{f"effective_rate_usd_per_{per}": group.rate_uusd / UUSD_PER_USD},
        estimated_cost_usd=row.amount_nusd / NUSD_PER_USD,
        event_info=_info(group, row.quantity),
    )


def _save_event(row: CheckpointRow, facts: dict[str, _Facts]) -> BillingUsageEvent:
    return BillingUsageEvent(
        **_envelope(row.hour, row.base_model, facts.get(row.session_id or ""), row.session_id),
        estimated_cost_usd=None,
        event_info=CheckpointBillingEvent(type="checkpoint", count=row.count),
    )


def _envelope(hour: datetime, base_model: str | None, facts: _Facts | None, session_id: str | None) -> dict[str, Any]:
    owner = facts.envelope if facts else {"user_id": None, "user_name": None, "session_id": session_id}
    return {"bucket_start": hour, "bucket_end": hour + HOUR, "base_model": base_model, **owner}


def _info(group: UsageGroup, quantity: int) -> BillingEventInfo:
    """Each type is said, though it is the default: the answer leaves out what is not."""
    if group.kind == STORAGE:
        free = group.rate_uusd == 0
        return StorageBillingEvent(type="storage", free=free, gigabyte_hours=quantity / BYTES_PER_GB)
    if group.kind == "train":
        return TrainingBillingEvent(type="training", token_count=quantity)
    if group.kind == "sample":
        return SamplingSampleBillingEvent(type="sampling_sample", token_count=quantity)
    cached = group.kind == "cached_prefill"
    return SamplingPrefillBillingEvent(type="sampling_prefill", cached=cached, token_count=quantity)
