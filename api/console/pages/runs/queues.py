"""What runs wait for, and who uses the machines: one's own organisation against all others; operators see every
organisation."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import HTMLResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.console.render import console_router, page
from api.console.security import ViewerDep
from api.console.titles import title_of
from api.errors import NotFound
from api.http.access import declare
from api.routes.runs.health import run_health
from api.state.service import ServiceDep
from api.who.lookup import visible
from scheduler.reports import occupancy
from scheduler.reports.occupancy import Timeline
from store import tables
from store.database.caller import unrestricted
from store.tables import Organisation, Run

router = console_router()

BUCKETS = 120
#: How many live runs have their health shown: those with the latest requests.
SHOWN_RUNS = 12
#: The kinds of machines, by their names in the statistics.
WORKERS = ("trainer", "generator")
#: How many organisations an operator's chart shows; the others are added up.
SHOWN_ORGS = 5
SPANS = {"15m": timedelta(minutes=15), "1h": timedelta(hours=1), "6h": timedelta(hours=6), "24h": timedelta(hours=24)}
PALETTE = ("train", "sample", "prefill", "storage", "cached_prefill")


@router.get("/queues", **declare(scope="public", limit="poll"))
async def queues(
    request: Request, service: ServiceDep, viewer: ViewerDep, span: Literal["15m", "1h", "6h", "24h"] = "1h"
) -> HTMLResponse:
    now = datetime.now(UTC)
    since = now - SPANS[span]

    def read(session: Session) -> dict[str, Any]:
        with unrestricted(session):  # times of all organisations; those of others are added up into one
            found = occupancy.stretches(session, since, now)
            wanted = select(Organisation.id, Organisation.name)
            if not viewer.operator:
                wanted = wanted.where(Organisation.id == viewer.org_id)
            names = {org_id: name for org_id, name in session.execute(wanted)}
        charts = {}
        for machine, stretches in found.items():
            line = occupancy.timeline(stretches, since, now, BUCKETS, set(names))
            charts[machine] = _by_organisation(line, names) if viewer.operator else _oneself(line, viewer.org_id)
        live = select(Run).where(visible(viewer.who, Run)).filter_by(state="live")
        runs = list(session.scalars(live.order_by(Run.last_request_at.desc(), Run.id).limit(SHOWN_RUNS)))
        owners = {run.id: session.get_one(tables.Session, run.session_id) for run in runs}
        return {"charts": charts, "runs": [(run, title_of(run, owners[run.id])) for run in runs]}

    values = await service.read(read)
    health = []
    for run, title in values.pop("runs"):
        try:
            health.append((run, title, await run_health(run.id, service, viewer.who, 3600.0)))
        except NotFound:
            continue
    stats = service.stats()
    loading = {role: max(stats.get(role, {}).get("loading", {}).values(), default=None) for role in WORKERS}
    facts: dict[str, Any] = {"health": health, "loading": loading, "span": span, "spans": list(SPANS)}
    return page(request, "queues.html", viewer, **facts, **values)


def _oneself(line: Timeline, org_id: str) -> dict[str, Any]:
    series = [
        {"name": "You", "kind": "own", "values": line.shares.get(org_id, [])},
        {"name": "Others", "kind": "others", "values": line.shares.get("others", [])},
    ]
    return _chart(line, series)


def _by_organisation(line: Timeline, names: dict[str, str]) -> dict[str, Any]:
    """The busiest organisations by name, and the rest as one."""
    order = sorted(line.shares, key=lambda owner: -sum(line.shares[owner]))
    shown, rest = order[:SHOWN_ORGS], order[SHOWN_ORGS:]
    series = [
        {"name": names.get(owner, owner), "kind": kind, "values": line.shares[owner]}
        for owner, kind in zip(shown, PALETTE, strict=False)
    ]
    if rest:
        columns = zip(*(line.shares[owner] for owner in rest), strict=True)
        series.append({"name": f"{len(rest)} others", "kind": "others", "values": [sum(column) for column in columns]})
    return _chart(line, series)


def _chart(line: Timeline, series: list[dict[str, Any]]) -> dict[str, Any]:
    """The series as the browser draws them, and the mean share of each."""
    kept = [entry for entry in series if any(entry["values"])]
    means = {entry["name"]: sum(entry["values"]) / len(entry["values"]) for entry in kept}
    for entry in kept:
        entry["values"] = [round(value, 4) for value in entry["values"]]
    return {"data": {"times": [round(at) for at in line.starts_s], "series": kept}, "means": means}
