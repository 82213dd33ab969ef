"""Listing runs, for RestClient and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from fastapi import APIRouter
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from weft.wire.rest import Cursor, TrainingRun, TrainingRunsResponse

from api.checks.runs import check_text
from api.errors import NotFound, quote
from api.http.access import LOOKING, declare
from api.http.auth import PrincipalDep
from api.routes.stored.checkpoints import NEWEST_FIRST, Limit, Offset, count, describe
from api.state.service import ServiceDep
from api.who.lookup import live_checkpoints, run_by_id, visible
from api.who.session_search import DEFAULT_PROJECT, text_values
from store import tables

router = APIRouter(prefix="/api/v1")

#: "owned": runs made with the key that asks; "accessible": all runs that it sees.
Scope = Literal["owned", "accessible"]


@router.get("/training_runs", response_model_exclude_unset=True, **declare(scope=LOOKING, limit="call"))
async def training_runs(
    service: ServiceDep,
    who: PrincipalDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: str | None = None,
) -> TrainingRunsResponse:
    """Runs, newest first."""
    check_text(project_id, "project_id", 64)

    def read(session: Session) -> TrainingRunsResponse:
        query = select(tables.Run).where(visible(who, tables.Run))
        query = query.join(tables.Session, tables.Session.id == tables.Run.session_id)
        if access_scope == "owned":
            query = query.where(who.made())
        if project_id is not None:
            project = None if project_id == DEFAULT_PROJECT else project_id
            query = query.where(tables.Session.project_id.is_not_distinct_from(project))
        total = count(session, query)
        page = session.scalars(query.order_by(tables.Run.created_at.desc(), tables.Run.id).limit(limit).offset(offset))
        cursor = Cursor(offset=offset, limit=limit, total_count=total)
        return TrainingRunsResponse(training_runs=_describe_runs(session, page.all()), cursor=cursor)

    return await service.read(read)


@router.get("/training_runs/{run_id}", response_model_exclude_unset=True, **declare(scope=LOOKING, limit="call"))
async def training_run(
    run_id: str, service: ServiceDep, who: PrincipalDep, access_scope: Scope = "owned"
) -> TrainingRun:
    def read(session: Session) -> TrainingRun:
        run = run_by_id(session, who, run_id)
        if access_scope == "owned" and not who.owns(session.get_one(tables.Session, run.session_id)):
            raise NotFound(f"no model {quote(run_id)} of this key: ask with access_scope=accessible")
        return _describe_runs(session, [run])[0]

    return await service.read(read)


def _describe_runs(session: Session, runs: Sequence[tables.Run]) -> list[TrainingRun]:
    """Runs as clients see them, with three queries for all of them together."""
    ids = [run.id for run in runs]
    names = select(tables.Organisation.id, tables.Organisation.name)
    names = names.where(tables.Organisation.id.in_({run.org_id for run in runs}))
    owners: dict[str, str] = {row.id: row.name for row in session.execute(names)}
    saved = tables.Checkpoint
    newest = func.row_number().over(partition_by=(saved.run_id, saved.kind), order_by=NEWEST_FIRST)
    ranked = select(saved.id, newest.label("place")).where(live_checkpoints(), saved.run_id.in_(ids)).subquery()
    last = select(saved).join(ranked, ranked.c.id == saved.id).where(ranked.c.place == 1)
    latest = {(row.run_id, row.kind): row for row in session.scalars(last)}
    asked = select(tables.Operation.lane, func.max(tables.Operation.accepted_at).label("at"))
    asked = asked.where(tables.Operation.lane.in_(ids)).group_by(tables.Operation.lane)
    last_asked: dict[str, datetime] = {row.lane: row.at for row in session.execute(asked)}
    return [_describe_run(run, owners, latest, last_asked.get(run.id)) for run in runs]


def _describe_run(
    run: tables.Run,
    owners: dict[str, str],
    latest: dict[tuple[str, str], tables.Checkpoint],
    asked: datetime | None,
) -> TrainingRun:
    weights, sampler = latest.get((run.id, "weights")), latest.get((run.id, "sampler_weights"))
    return TrainingRun(
        training_run_id=run.id,
        base_model=run.base_model,
        model_owner=owners[run.org_id],
        is_lora=True,
        corrupted=False,
        lora_rank=run.rank,
        last_request_time=asked or run.last_request_at,
        last_checkpoint=describe(weights) if weights else None,
        last_sampler_checkpoint=describe(sampler) if sampler else None,
        user_metadata=text_values(run.user_metadata),
    )
