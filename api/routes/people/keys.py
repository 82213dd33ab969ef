"""API keys, for those who manage them: admins manage all keys of their organisation, everybody else their own.

A secret is in exactly one answer, that of the request which made it. Nobody makes or touches a key that goes beyond the
credential they use (`api.who.reach`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from sqlalchemy import func, not_, select
from sqlalchemy.orm import Session
from weft.wire.account.organisation import ApiKeyRow, ApiKeysResponse, ApiKeyWithSecret
from weft.wire.base import Count

from api.checks.runs import check_text
from api.errors import Forbidden, Invalid, quote
from api.http.access import declare
from api.http.auth import PresentPrincipalDep, PrincipalDep, while_good
from api.http.bodies import read_json
from api.state.service import ServiceDep
from api.who.credentials import changed_key, managed_key, permit_secret
from api.who.reach import Reach
from store import tables
from store.people import keys
from store.people.organisations import membership, project_by_id
from store.people.roles import ADMIN, SCOPES, Scope

router = APIRouter(prefix="/api/v1/weft/keys")

LONGEST_OVERLAP_S = 30 * 24 * 3600
#: How many good keys an organisation, and one of its members, may have at a time: this bounds how many are made.
MAX_KEYS = 1000
MAX_KEYS_OF_A_MEMBER = 100
#: How many ended keys a list shows: programs that make a key for each job leave any number of them.
MAX_ENDED = 1000


class NewKey(BaseModel):
    """`user_id`: the member that it belongs to, whose role bounds it; without, it belongs to the organisation."""

    model_config = ConfigDict(extra="forbid")
    name: str = ""
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=len(SCOPES))] = ["admin"]
    user_id: str | None = None
    project_id: str | None = None
    expires_at: AwareDatetime | None = None


class Rotation(BaseModel):
    """For how long the present secret stays good beside the new one."""

    model_config = ConfigDict(extra="forbid")
    overlap_seconds: Annotated[Count, Field(le=LONGEST_OVERLAP_S)] = 24 * 3600


@router.get("", **declare(scope="any", limit="call"))
async def list_keys(service: ServiceDep, who: PrincipalDep) -> ApiKeysResponse:
    """The keys that `who` manages, newest first; of those that have ended the newest MAX_ENDED."""
    key = tables.ApiKey

    def read(session: Session) -> list[ApiKeyRow]:
        query, good = select(key).where(key.org_id == who.org_id), keys.good_at(datetime.now(UTC))
        if who.project_id is not None:
            query = query.where(key.project_id == who.project_id)
        if ADMIN not in who.scopes:
            query = query.where(key.user_id == who.user_id, key.user_id.is_not(None))
        ended = session.scalars(query.where(not_(good)).order_by(key.id.desc()).limit(MAX_ENDED))
        rows = [*session.scalars(query.where(good)), *ended]
        return [_shown(row) for row in sorted(rows, key=lambda row: -row.id)]

    return ApiKeysResponse(keys=await service.read(read))


@router.post("", **declare(scope="any", limit="call"))
async def create_key(request: Request, service: ServiceDep, who: PresentPrincipalDep) -> ApiKeyWithSecret:
    """A new key, and here only its secret."""
    body = await read_json(request, NewKey)
    name = check_text(body.name, "name", 128) or ""
    if not name.isprintable():
        raise Invalid(f"name: must be of printable characters, got {quote(name)}")
    wanted = frozenset(body.scopes)
    if ADMIN not in who.scopes and (who.user_id is None or body.user_id not in (None, who.user_id)):
        raise Forbidden("user_id: only an admin makes keys for others or for the organisation itself")
    # in another time zone it may be outside of the calendar
    if body.expires_at is not None and body.expires_at.year >= datetime.max.year:
        raise Invalid("expires_at: must be before the year 9999; leave it out for a key without an end")
    if body.expires_at is not None and body.expires_at <= datetime.now(UTC):
        raise Invalid(f"expires_at: must be in the future, got {body.expires_at.isoformat()}")
    user_id = body.user_id if ADMIN in who.scopes else who.user_id
    project_id = body.project_id if who.project_id is None else who.project_id

    def write(session: Session) -> ApiKeyWithSecret:
        _check_owner(session, who.org_id, user_id, project_id)
        permit_secret(who, Reach.of(wanted, who.role, project_id, body.expires_at), user_id, "make this key")
        row, secret = keys.new_key(
            session,
            who.org_id,
            name=name,
            scopes=wanted,
            user_id=user_id,
            project_id=project_id,
            expires_at=body.expires_at,
            by=who.key_id,
        )
        return _with_secret(row, secret)

    return await service.database.write(while_good(request, who, write), lock=who.org_id)


@router.get("/{key_id}", **declare(scope="any", limit="call"))
async def get_key(key_id: str, service: ServiceDep, who: PrincipalDep) -> ApiKeyRow:
    return await service.read(lambda session: _shown(managed_key(session, who, key_id)))


@router.post("/{key_id}/rotate", **declare(scope="any", limit="call"))
async def rotate_key(key_id: str, request: Request, service: ServiceDep, who: PresentPrincipalDep) -> ApiKeyWithSecret:
    """Another secret for the same key: its limits, its sessions and what it has cost stay its own."""
    body = await read_json(request, Rotation)

    def write(session: Session) -> ApiKeyWithSecret:
        row = changed_key(session, who, key_id, "rotate")
        if not keys.is_good(row):
            raise Invalid(f"key {key_id} is revoked or expired: make a new one")
        reach = Reach.of(row.scopes, who.role, row.project_id, row.expires_at)
        permit_secret(who, reach, row.user_id, f"be given the secret of key {key_id}")
        secret = keys.rotate(session, row, timedelta(seconds=body.overlap_seconds), by=who.key_id)
        return _with_secret(row, secret)

    return await service.database.write(while_good(request, who, write), lock=who.org_id)


@router.delete("/{key_id}", **declare(scope="any", limit="call"))
async def revoke_key(key_id: str, service: ServiceDep, who: PresentPrincipalDep) -> ApiKeyRow:
    """Good for nothing within seconds, everywhere. Doing it twice is no error."""

    def write(session: Session) -> ApiKeyRow:
        row = changed_key(session, who, key_id, "revoke")
        if row.revoked_at is None:
            keys.revoke_row(session, row, by=who.key_id)
        return _shown(row)

    return await service.database.write(write, lock=who.org_id)


def _check_owner(session: Session, org_id: str, user_id: str | None, project_id: str | None) -> None:
    if user_id is not None:
        membership(session, org_id, user_id)
    if project_id is not None and project_by_id(session, org_id, project_id).archived_at is not None:
        raise Invalid(f"project_id: {quote(project_id)} is archived")
    key = tables.ApiKey
    good = select(func.count()).where(key.org_id == org_id, keys.good_at(datetime.now(UTC)))
    if (session.scalar(good) or 0) >= MAX_KEYS:
        raise Invalid(f"the organisation has {MAX_KEYS} keys, which is the limit: revoke some first")
    if user_id is not None and (session.scalar(good.where(key.user_id == user_id)) or 0) >= MAX_KEYS_OF_A_MEMBER:
        raise Invalid(f"member {user_id} has {MAX_KEYS_OF_A_MEMBER} keys, which is the limit: revoke some first")


def _shown(row: tables.ApiKey) -> ApiKeyRow:
    return ApiKeyRow.model_validate(row, from_attributes=True)


def _with_secret(row: tables.ApiKey, secret: str) -> ApiKeyWithSecret:
    return ApiKeyWithSecret(**dict(_shown(row)), key=secret)
