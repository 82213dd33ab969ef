"""Curves of runs: logged by users, drawn by the console and by clients.

A point has only a name, a step and a number. The rate of points is limited per organisation, their number per run.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect
from weft.wire import LogMetricsRequest, LogMetricsResponse, RunCurveResponse, RunMetricsResponse

from api.errors import Invalid
from api.http.access import LOOKING, declare
from api.http.auth import PrincipalDep
from api.http.bodies import read_json
from api.state.rates import count_points
from api.state.service import ServiceDep
from api.who.lookup import run_by_id
from api.who.may_change import own_run
from billing.reports.spending import spent_by
from store.curves import Curve, Point, TooManyPoints, curves_of, log_points, read_curve

router = APIRouter(prefix="/api/v1/weft")

#: With how many points a curve is drawn at most.
MAX_DRAWN = 2000


@router.post("/runs/{run_id}/metrics", **declare(scope="train", limit="call", body="medium"))
async def log_metrics(run_id: str, request: Request, service: ServiceDep, who: PrincipalDep) -> LogMetricsResponse:
    """Add points to the curves of a run. Sending the same again changes nothing."""
    body = await read_json(request, LogMetricsRequest)
    await count_points(service.rates, who, len(body.points))
    points = [Point(point.name, point.step, point.value) for point in body.points]
    now = datetime.now(UTC)

    def write(session: Session) -> int:
        own_run(session, who, run_id)
        return log_points(session, who.org_id, run_id, points, now)

    try:
        return LogMetricsResponse(new=await service.database.write(write))
    except TooManyPoints as error:
        raise Invalid(f"points: {error}") from None


@router.get("/runs/{run_id}/metrics", **declare(scope=LOOKING, limit="call"))
async def run_metrics(
    run_id: str,
    request: Request,
    service: ServiceDep,
    who: PrincipalDep,
    name: Annotated[list[str] | None, Query(max_length=64)] = None,
    points: Annotated[int, Query(ge=2, le=MAX_DRAWN)] = MAX_DRAWN,
) -> RunMetricsResponse:
    """The curves of a run (all, or those of `name`), thinned to `points` each, lowest and highest values kept."""
    # One curve at a time, while the client is connected: a run may have twelve million points.

    def there(session: Session) -> list[str]:
        run_by_id(session, who, run_id)
        return [curve.name for curve in curves_of(session, who.org_id, [run_id]).get(run_id, [])]

    def read(session: Session, curve: str) -> Curve:
        return read_curve(session, who.org_id, run_id, curve, points)

    curves: list[Curve] = []
    for each in await service.read(there):
        if name is not None and each not in name:
            continue
        if await request.is_disconnected():
            raise ClientDisconnect
        curves.append(await service.read(partial(read, curve=each), service.long_reads))
    times = [curve.at for curve in curves]
    spent = await service.read(lambda session: spent_by(session, who.org_id, run_id, times))
    return RunMetricsResponse(
        run_id=run_id,
        curves=[
            RunCurveResponse(
                name=curve.name,
                points=curve.points,
                steps=curve.steps,
                values=curve.values,
                tokens=[used.tokens for used in used_at],
                cost_nusd=[used.amount_nusd for used in used_at],
            )
            for curve, used_at in zip(curves, spent, strict=True)
        ],
    )
