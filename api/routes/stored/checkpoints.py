"""Saved weights: listed, published, given a time to live, deleted, and fetched."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session
from weft.wire.rest import (
    CHECKPOINT_TYPES,
    Checkpoint,
    CheckpointsListResponse,
    Cursor,
    ExternalWeightsUrlsResponse,
    SetTtlRequest,
    SetTtlResponse,
)
from weft.wire.service import StatusResponse

from api.checks.runs import check_ttl
from api.errors import Gone, Invalid
from api.http.access import LOOKING, declare
from api.http.archives import LINKS_LAST, archive_ref, archived, make_archive
from api.http.auth import PrincipalDep
from api.http.bodies import read_json
from api.operations.paying import need_money, need_room
from api.paths import CheckpointPath, parse_path
from api.routes.stored.downloads import archive_path, file_path
from api.state.service import Service, ServiceDep
from api.who.lookup import checkpoint_at, live_checkpoints, run_by_id, visible
from api.who.may_change import own_checkpoint
from api.who.principal import Principal
from api.who.session_search import text_values
from billing.metering import storage
from scheduler.journal.ending.references import in_use
from store import tables
from store.blobs.contract import Damaged
from store.database import audit

log = logging.getLogger(__name__)

router = APIRouter(prefix="/api/v1")

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31)]
OLDEST_FIRST = (tables.Checkpoint.created_at, tables.Checkpoint.id)
NEWEST_FIRST = (tables.Checkpoint.created_at.desc(), tables.Checkpoint.id)
_ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


@router.get("/checkpoints", response_model_exclude_unset=True, **declare(scope=LOOKING, limit="call"))
async def checkpoints(
    request: Request, service: ServiceDep, who: PrincipalDep, limit: Limit = 100, offset: Offset = 0
) -> CheckpointsListResponse:
    """The checkpoints that the key sees, newest first."""
    shown = tables.Checkpoint.kind.in_(readable_kinds(request))

    def read(session: Session) -> CheckpointsListResponse:
        query = select(tables.Checkpoint).where(visible(who, tables.Checkpoint), live_checkpoints(), shown)
        total = count(session, query)
        rows = session.scalars(query.order_by(*NEWEST_FIRST).limit(limit).offset(offset))
        cursor = Cursor(offset=offset, limit=limit, total_count=total)
        return CheckpointsListResponse(checkpoints=[describe(row) for row in rows], cursor=cursor)

    return await service.read(read)


@router.get(
    "/training_runs/{run_id}/checkpoints",
    response_model=CheckpointsListResponse,
    response_model_exclude_unset=True,
    **declare(scope=LOOKING, limit="call"),
)
async def run_checkpoints(run_id: str, request: Request, service: ServiceDep, who: PrincipalDep) -> Response:
    """All checkpoints of a run, oldest first. They may be tens of thousands."""
    shown = tables.Checkpoint.kind.in_(readable_kinds(request))

    def read(session: Session) -> str:
        run_by_id(session, who, run_id)
        query = select(tables.Checkpoint).filter_by(org_id=who.org_id, run_id=run_id).where(live_checkpoints(), shown)
        rows = session.scalars(query.order_by(*OLDEST_FIRST))
        return CheckpointsListResponse(checkpoints=list(map(describe, rows))).model_dump_json(exclude_unset=True)

    return Response(await service.read(read, service.long_reads), media_type="application/json")


@router.post(_ONE + "/publish", **declare(scope="checkpoints:write", limit="call"))
async def publish(run_id: str, kind: str, name: str, service: ServiceDep, who: PrincipalDep) -> StatusResponse:
    """Let every organisation read this checkpoint: load it, copy it, sample from it. Nothing else of the run."""
    await _set_public(service, who, _path(run_id, kind, name), True)
    return StatusResponse(status="published")


@router.delete(_ONE + "/publish", **declare(scope="checkpoints:write", limit="call"))
async def unpublish(run_id: str, kind: str, name: str, service: ServiceDep, who: PrincipalDep) -> StatusResponse:
    """From now on only the own organisation may read it. What others have made of it stays theirs."""
    await _set_public(service, who, _path(run_id, kind, name), False)
    return StatusResponse(status="unpublished")


async def _set_public(service: Service, who: Principal, path: CheckpointPath, public: bool) -> None:
    """Saying it twice is no error: a 409 would have clients try again for minutes."""

    def write(session: Session) -> None:
        row = own_checkpoint(session, who, path)
        if row.public != public:
            if public:
                need_money(session, who, _owner(session, row))
            row.public = public
            _note(session, who, "checkpoint_published" if public else "checkpoint_unpublished", path)

    await service.database.write(write, lock=who.org_id)


@router.put(_ONE + "/ttl", **declare(scope="checkpoints:write", limit="call"))
async def set_ttl(
    run_id: str, kind: str, name: str, request: Request, service: ServiceDep, who: PrincipalDep
) -> SetTtlResponse:
    """Let a checkpoint expire in `ttl_seconds` from now, or (null) never."""
    path = _path(run_id, kind, name)
    body = await read_json(request, SetTtlRequest)
    return SetTtlResponse(expires_at=await expire(service, who, path, body.ttl_seconds))


async def expire(service: Service, who: Principal, path: CheckpointPath, ttl: int | None) -> datetime | None:
    """Let a checkpoint expire `ttl` seconds from now, or never. Returns when."""
    check_ttl(ttl)
    expires = None if ttl is None else datetime.now(UTC) + timedelta(seconds=ttl)

    def write(session: Session) -> None:
        row = own_checkpoint(session, who, path)
        if row.expires_at is not None and (expires is None or expires > row.expires_at):
            need_money(session, who, _owner(session, row))  # it will be stored for longer, which costs more
        row.expires_at = expires
        _note(session, who, "checkpoint_ttl_set", path, ttl_seconds=ttl)

    await service.database.write(write, lock=who.org_id)
    return expires


@router.delete(_ONE, **declare(scope="checkpoints:write", limit="call"))
async def delete_checkpoint(
    run_id: str, kind: str, name: str, service: ServiceDep, who: PrincipalDep
) -> StatusResponse:
    """Delete a checkpoint. It is gone at once; its files stay for as long as something else needs them."""
    path = _path(run_id, kind, name)

    def write(session: Session) -> str | None:
        row = own_checkpoint(session, who, path)
        storage.end(session, [row], datetime.now(UTC))
        session.delete(row)
        _note(session, who, "checkpoint_deleted", path)
        return None if in_use(session, row.ref) else row.ref

    free = await service.database.write(write)
    if free is not None:
        with suppress(OSError):  # the reaper deletes them later
            for ref in (free, archive_ref(free)):
                await service.threads.run(who.org_id, partial(service.blobs.delete_tree, ref))
    return StatusResponse(status="deleted")


@router.get(_ONE + "/external_weights_urls", **declare(scope="checkpoints:read", limit="call"))
async def external_weights_urls(
    run_id: str, kind: str, name: str, request: Request, service: ServiceDep, who: PrincipalDep
) -> ExternalWeightsUrlsResponse:
    """A link for each file of an export, good for an hour without a key, or until the credential that asks ends."""
    path = _path(run_id, kind, name)
    if path.kind != "external_weights":
        raise Invalid(f"path: {path} is no export: only external weights (save_weights_external) have links")
    row = await service.read(lambda session: checkpoint_at(session, who, path))
    expires = who.reach.ends_by(datetime.now(UTC) + LINKS_LAST).replace(microsecond=0)

    def links() -> dict[str, str]:
        service.blobs.check_folder(row.ref)
        names = service.blobs.files(row.ref)
        return {name: service.signer.link(request, file_path(row.id, name), expires, who) for name in names}

    with _whole(path):
        return ExternalWeightsUrlsResponse(urls=await service.threads.run(who.org_id, links), expires=expires)


@router.get(
    _ONE + "/archive",
    response_class=RedirectResponse,
    status_code=302,
    **declare(scope="checkpoints:read", limit="call"),
)
async def archive(
    run_id: str, kind: str, name: str, request: Request, service: ServiceDep, who: PrincipalDep
) -> RedirectResponse:
    """A link to a tar of the weights as an export, where older clients expect it: in the Location of a redirect."""
    path = _path(run_id, kind, name)

    there = await service.threads.run(who.org_id, lambda: archived(service.blobs))

    def read(session: Session) -> tables.Checkpoint:
        row = checkpoint_at(session, who, path)
        if row.ref not in there:
            saved = tables.Checkpoint
            own = select(saved.ref, saved.size_bytes).where(saved.org_id == who.org_id, saved.ref.in_(there))
            packed = sum({ref: size for ref, size in session.execute(own)}.values())  # copies share one archive
            need_room(session, who.org_id, service.settings.limits, "archive_bytes", row.size_bytes, packed)
        return row

    row = await service.read(read)
    with _whole(path):
        await service.threads.run(who.org_id, lambda: make_archive(service.blobs, row.ref))
    expires = who.reach.ends_by(datetime.now(UTC) + LINKS_LAST).replace(microsecond=0)
    link = service.signer.link(request, archive_path(row.id), expires, who)
    return RedirectResponse(link, 302, {"expires": format_datetime(expires, usegmt=True)})


@contextmanager
def _whole(path: CheckpointPath) -> Iterator[None]:
    """Raise if the files are not as they were saved: nobody gets damaged ones."""
    try:
        yield
    except (FileNotFoundError, Damaged) as error:
        log.error("checkpoint %s: %s", path, error)
        lost = "missing" if isinstance(error, FileNotFoundError) else "damaged"
        raise Gone(f"the files of {path} are {lost} on the server's disk: save the weights again") from None


def _owner(session: Session, row: tables.Checkpoint) -> tables.Session:
    return session.get_one(tables.Session, session.get_one(tables.Run, row.run_id).session_id)


def _path(run_id: str, kind: str, name: str) -> CheckpointPath:
    return parse_path(f"tinker://{run_id}/{kind}/{name}", "path")


def _note(session: Session, who: Principal, event: str, path: CheckpointPath, **detail: Any) -> None:
    audit.record(session, org_id=who.org_id, key_id=who.key_id, event=event, target=str(path), detail=detail)


def count(session: Session, query: Select[Any]) -> int:
    return session.scalar(select(func.count()).select_from(query.subquery())) or 0


def describe(row: tables.Checkpoint) -> Checkpoint:
    """A checkpoint as clients see it. `base_model` is not said: the run says it."""
    return Checkpoint(
        checkpoint_id=f"{row.kind}/{row.name}",
        checkpoint_type=CHECKPOINT_TYPES[row.kind],
        time=row.created_at,
        tinker_path=str(CheckpointPath(row.run_id, row.kind, row.name)),
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata=text_values(row.user_metadata),
        expires_at=row.expires_at,
    )


#: Older clients fail on a listing that contains external weights.
EXTERNAL_SINCE = (0, 28)

_TINKER = re.compile(r"AsyncTinker/Python (\d{1,4})\.(\d{1,4})")


def readable_kinds(request: Request) -> list[str]:
    """The kinds of checkpoints that a listing may show to this client."""
    tinker = _TINKER.match(request.headers.get("user-agent", ""))
    old = tinker is not None and (int(tinker[1]), int(tinker[2])) < EXTERNAL_SINCE
    return [kind for kind in CHECKPOINT_TYPES if not (old and kind == "external_weights")]
