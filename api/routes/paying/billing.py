"""Usage by the hour, storage included, and what is stored now, in the shapes of Tinker's AdminClient.

Its amounts are floats of dollars. They are the ledger's integers divided once, so rounding them to nine digits gives
the ledger's nano-dollars back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
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

from api.checks.runs import check_text, check_utc
from api.errors import Invalid
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.state.service import Service, ServiceDep
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
#: How many rows, or sessions, are written at a time.
AT_A_TIME = 250

T = TypeVar("T")
#: The fields of an event that tell its project, key and owner.
_Envelope = dict[str, Any]


@router.get("/events", response_model=BillingUsageResponse, **declare(scope="billing:read", limit="call"))
async def usage_events(
    service: ServiceDep,
    who: PrincipalDep,
    starting_on: Annotated[AwareDatetime, Query()],
    ending_before: Annotated[AwareDatetime, Query()],
) -> StreamingResponse:
    """The organisation's usage in a window, by hour, type, model, session and user, exact as of now."""
    start, end = _window(starting_on, ending_before)

    def read(session: Session) -> tuple[list[GroupRow | CheckpointRow], dict[str, _Envelope]]:
        rows: list[GroupRow | CheckpointRow] = [*usage_rows(session, who.org_id, start, end)]
        rows += checkpoint_rows(session, who.org_id, start, end)
        owners = _owners(session, {row.session_id for row in rows if row.session_id is not None})
        return sorted(rows, key=lambda row: row.hour), owners

    rows, owners = await service.read(read)
    return StreamingResponse(_pieces(service, who.org_id, rows, owners), media_type="application/json")


async def _pieces(
    service: Service, org_id: str, rows: Sequence[GroupRow | CheckpointRow], owners: Mapping[str, _Envelope]
) -> AsyncIterator[bytes]:
    """A BillingUsageResponse, some rows at a time: a window may have tens of thousands of sessions, each with up to 16
    KB of metadata, and the whole answer would be gigabytes in memory."""
    yield b'{"data":['
    for number, part in enumerate(_parts(rows)):
        written = await service.threads.run(org_id, partial(_written, part, owners))
        yield written if number == 0 else b"," + written
    yield b'],"sessions":{'
    for number, names in enumerate(_parts(sorted(owners))):
        said = await service.read(partial(_metadata, ids=names))
        yield said if number == 0 else b"," + said
    yield b'},"cost_data_through":null}'  # the ledger is final: no invoice changes its prices


def _written(rows: Sequence[GroupRow | CheckpointRow], owners: Mapping[str, _Envelope]) -> bytes:
    events = (_save_event(row, owners) if isinstance(row, CheckpointRow) else _usage_event(row, owners) for row in rows)
    return b",".join(event.model_dump_json(exclude_unset=True).encode() for event in events)


def _metadata(session: Session, ids: Sequence[str]) -> bytes:
    """The sessions' metadata as members of a JSON object, by session."""
    found = session.execute(select(tables.Session.id, tables.Session.user_metadata).where(tables.Session.id.in_(ids)))
    said = {id: BillingUsageSession(user_metadata=text_values(metadata) or None) for id, metadata in found}
    return b",".join(orjson.dumps(id) + b":" + said[id].model_dump_json().encode() for id in sorted(said))


def _parts(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """The sequence in parts: databases also limit the parameters of a statement."""
    return (rows[start : start + AT_A_TIME] for start in range(0, len(rows), AT_A_TIME))


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


def _owners(session: Session, ids: Iterable[str]) -> dict[str, _Envelope]:
    """By session, for those that exist: the fields of its owner."""
    row = tables.Session
    found = [
        each
        for part in _parts(sorted(ids))
        for each in session.execute(select(row.id, row.key_id, row.project_id).where(row.id.in_(part)))
    ]
    names = _key_names(session, {each.key_id for each in found if each.key_id is not None})
    return {
        each.id: {
            "user_id": owner_urn(each.key_id) if each.key_id is not None else None,
            "user_name": names.get(each.key_id),
            "session_id": each.id,
            "project_id": each.project_id,
        }
        for each in found
    }


def _key_names(session: Session, key_ids: set[int]) -> dict[int | None, str]:
    """Keys, by the part of them that may be shown."""
    query = select(tables.ApiKey.id, tables.ApiKey.prefix).where(tables.ApiKey.id.in_(key_ids))
    return {key_id: prefix for key_id, prefix in session.execute(query)}


def _usage_event(row: GroupRow, owners: Mapping[str, _Envelope]) -> BillingUsageEvent:
    group = row.group
    per = "gigabyte_month" if group.kind == STORAGE else "million_tokens"
    return BillingUsageEvent(
        **_envelope(group.hour, group.base_model, group.session_id, owners),
        **{f"effective_rate_usd_per_{per}": group.rate_uusd / UUSD_PER_USD},
        estimated_cost_usd=row.amount_nusd / NUSD_PER_USD,
        event_info=_info(group, row.quantity),
    )


def _save_event(row: CheckpointRow, owners: Mapping[str, _Envelope]) -> BillingUsageEvent:
    return BillingUsageEvent(
        **_envelope(row.hour, row.base_model, row.session_id, owners),
        estimated_cost_usd=None,
        event_info=CheckpointBillingEvent(type="checkpoint", count=row.count),
    )


def _envelope(
    hour: datetime, base_model: str | None, session_id: str | None, owners: Mapping[str, _Envelope]
) -> _Envelope:
    owner = owners.get(session_id or "") or {"user_id": None, "user_name": None, "session_id": session_id}
    return {"bucket_start": hour, "bucket_end": hour + HOUR, "base_model": base_model, **owner}


def _info(group: UsageGroup, quantity: int) -> BillingEventInfo:
    """An event with its `type`, although that is a default: the answer leaves defaults out."""
    if group.kind == STORAGE:
        free = group.rate_uusd == 0
        return StorageBillingEvent(type="storage", free=free, gigabyte_hours=quantity / BYTES_PER_GB)
    if group.kind == "train":
        return TrainingBillingEvent(type="training", token_count=quantity)
    if group.kind == "sample":
        return SamplingSampleBillingEvent(type="sampling_sample", token_count=quantity)
    cached = group.kind == "cached_prefill"
    return SamplingPrefillBillingEvent(type="sampling_prefill", cached=cached, token_count=quantity)
