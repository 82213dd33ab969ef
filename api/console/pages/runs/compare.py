"""Two to five runs side by side: their curves over each other, what each took to reach a value, what they cost, and the
hyperparameters in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import HTMLResponse, JSONResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.console.hyperparameters import hyperparameters
from api.console.lists import Text
from api.console.pages.runs.listing import MOST_COMPARED, TELLING, RunLine, run_lines
from api.console.render import console_router, page
from api.console.security import ViewerDep
from api.errors import Invalid
from api.http.access import declare
from api.routes.runs.metrics import run_metrics
from api.state.rates import count_request
from api.state.service import ServiceDep
from api.who.lookup import run_by_id, visible
from billing.reports.spending import Spent, spent_until
from store.curves import bests, curves_of, first_reaching
from store.tables import Run

router = console_router()

LEAST, MOST = 2, MOST_COMPARED
#: How many runs are offered, the newest.
OFFERED = 25
#: How many points a curve has in a comparison. A chart has some 500 pixels.
DRAWN = 150
#: Names of curves of which lower values are better.
_FALLING = ("loss", "kl", "error", "perplexity", "ppl", "nll")

Chosen = Annotated[list[str], Query(max_length=50)]
Direction = Literal["", "up", "down"]


@dataclass(frozen=True)
class Reached:
    """When a run's curve first reached the given value; `step` is None if it never did. `best` is None for a run
    without that curve."""

    line: RunLine
    title: str
    best: float | None
    step: int | None = None
    spent: Spent | None = None
    after: timedelta | None = None


@router.get("/compare", **declare(scope="public", limit="poll"))
async def compare(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    run: Chosen = [],  # noqa: B006
    metric: Text = "",
    direction: Direction = "",
    target: Annotated[float | None, Query(allow_inf_nan=False)] = None,
) -> HTMLResponse:
    await count_request(request, viewer.who)
    chosen = _distinct(run)

    def read(session: Session) -> dict[str, Any]:
        runs = [run_by_id(session, viewer.who, run_id) for run_id in chosen]
        newest = select(Run).where(visible(viewer.who, Run)).order_by(Run.created_at.desc(), Run.id).limit(OFFERED)
        offered = [*runs, *(each for each in session.scalars(newest) if each.id not in chosen)]
        offers = run_lines(session, viewer.org_id, offered)
        values: dict[str, Any] = {
            "offered": offers,
            "chosen": chosen,
            "enough": len(runs) >= LEAST,
        }
        if len(runs) < LEAST:
            return values
        lines = offers[: len(runs)]
        names = sorted(
            {curve.name for curves in curves_of(session, viewer.org_id, chosen).values() for curve in curves}
        )
        name = metric if metric in names else _telling(names)
        rising = direction == "up" or (direction == "" and not any(word in name.lower() for word in _FALLING))
        best = bests(session, viewer.org_id, chosen, name, rising=rising)
        wanted = target if target is not None else _all_reach(best, rising)
        same, different = _settings(session, runs)
        return values | {
            "lines": [(line, line.title or line.run.id, _lasted(line.run)) for line in lines],
            "names": names,
            "metric": name,
            "rising": rising,
            "target": wanted,
            "reached": [_reached(session, line, name, best.get(line.run.id), wanted, rising) for line in lines],
            "same": same,
            "different": different,
            "query": {"metric": metric, "direction": direction, "target": "" if target is None else f"{target:g}"},
        }

    return page(request, "compare.html", viewer, most=MOST, least=LEAST, **await service.read(read))


@router.get("/compare/curves", **declare(scope="public", limit="poll"))
async def curves(
    request: Request,
    service: ServiceDep,
    viewer: ViewerDep,
    run: Chosen = [],  # noqa: B006
) -> JSONResponse:
    """The API's own curves of each run, for the page to draw."""
    await count_request(request, viewer.who)
    found = []
    for run_id in _distinct(run):
        answer = await run_metrics(run_id, request, service, viewer.who, None, DRAWN)
        found.append({"id": run_id, "curves": answer.model_dump()["curves"]})
    return JSONResponse({"runs": found})


def _distinct(chosen: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(chosen))
    if len(distinct) > MOST:
        raise Invalid(f"run: {LEAST} to {MOST} runs can be compared, not {len(distinct)}: choose fewer")
    return distinct


def _telling(names: Sequence[str]) -> str:
    return next((name for name in TELLING if name in names), names[0] if names else "")


def _all_reach(best: dict[str, float], rising: bool) -> float | None:
    """A value that the curve reaches in all runs that have it: the worst of their best values, in readable digits."""
    if not best:
        return None
    worst = min(best.values()) if rising else max(best.values())
    rounded = float(f"{worst:.3g}")
    beyond = rounded > worst if rising else rounded < worst
    return worst if beyond else rounded


def _reached(
    session: Session, line: RunLine, name: str, best: float | None, target: float | None, rising: bool
) -> Reached:
    title, run = line.title or line.run.id, line.run
    if best is None or target is None:
        return Reached(line, title, best)
    point = first_reaching(session, run.org_id, run.id, name, target, rising=rising)
    if point is None:
        return Reached(line, title, best)
    return Reached(
        line, title, best, point.step, spent_until(session, run.org_id, run.id, point.at), point.at - run.created_at
    )


def _lasted(run: Run) -> timedelta:
    """The time from the run's first request to its last, in words."""
    return max(timedelta(0), run.last_request_at - run.created_at)


def _settings(session: Session, runs: Sequence[Run]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The hyperparameters that are equal in all runs, and those that differ, in the order of the runs."""
    each = [hyperparameters(session, run) for run in runs]
    names = list(dict.fromkeys(name for found in each for name in found))
    same, different = {}, {}
    for name in names:
        values = [found.get(name, "–") for found in each]
        if len(set(values)) == 1:
            same[name] = values[0]
        else:
            different[name] = values
    return same, different
