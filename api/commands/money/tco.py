"""`weftd tco`: cost per Mtok beside price per Mtok, and the margin of every organisation and model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from api.commands.places import Finite, Place, database_of, settings_of, where

if TYPE_CHECKING:
    from billing.reports.ownership import Ownership


@click.command()
@where
@click.option("--days", type=click.IntRange(1), help="Whole days back from now (default 30, if they are kept).")
@click.option("--gpus", type=click.IntRange(1, 100_000), help="GPUs that are paid for ([ownership] in the settings).")
@click.option(
    "--gpu-hour", type=Finite(0, 1e6, min_open=True), help="Dollars per GPU-hour, in place of the computed cost."
)
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def tco(place: Place, days: int | None, gpus: int | None, gpu_hour: float | None, as_json: bool) -> None:
    """What making a token costs, and the margin in its price."""
    from sqlalchemy import select

    from billing.reports.ownership import days_back, ownership
    from billing.reports.tco import GpuHour, Server
    from store.tables import Organisation

    settings = settings_of(place)
    try:
        days = days_back(days, settings.limits.sample_days)
    except ValueError as error:
        raise click.UsageError(f"--days: {error}") from None
    owned = settings.ownership
    hour = Server(owned).gpu_hour if gpu_hour is None else GpuHour(0.0, gpu_hour)
    until = datetime.now(UTC)
    since = (until - timedelta(days=days)).replace(minute=0, second=0, microsecond=0)
    with database_of(place) as database, database.read() as session:
        found = ownership(session, since, until, gpu_hour=hour, gpus=gpus or owned.gpus, machines=owned.machines)
        names = {org.id: org.name for org in session.scalars(select(Organisation))}
    click.echo(json.dumps(_facts(found)) if as_json else _table(found, names))


_PER_MTOK = ("price_usd_per_mtok", "cost_usd_per_mtok")


def _facts(found: Ownership) -> dict[str, Any]:
    rows = [asdict(row) | {name: getattr(row, name) for name in ("margin_usd", *_PER_MTOK)} for row in found.margins]
    return {
        "since": found.since.isoformat(),
        "until": found.until.isoformat(),
        "gpus": found.gpus,
        "gpu_hour_usd": found.gpu_hour.usd,
        **{name: getattr(found, name) for name in ("cost_usd", "paid_usd", "tokens", "tokens_per_s_per_gpu")},
        **{name: getattr(found, name) for name in ("utilisation", *_PER_MTOK)},
        "margins": rows,
    }


def _table(found: Ownership, names: Mapping[str, str]) -> str:
    hour, margin_usd = found.gpu_hour, found.paid_usd - found.cost_usd
    rows = [(names.get(row.org_id, row.org_id), row.base_model, row) for row in found.margins]
    wide = max([24, *(len(name) for name, _, _ in rows)])
    long = max([24, *(len(model) for _, model, _ in rows)])
    called = f"{'organisation':<{wide}} {'model':<{long}}"
    head = f"{called} {'Mtok':>10} {'busy s':>10} {'price/Mtok':>11} {'cost/Mtok':>11} {'margin':>10}"
    lines = [
        f"GPU-hour ${hour.usd:.4f} (capital {hour.capital_usd:.4f}, running {hour.running_usd:.4f}), "
        f"{found.gpus} GPUs, {found.seconds / 3600:.1f} h: ${found.cost_usd:.2f}",
        f"{found.tokens / 1e6:.3f} Mtok, {found.tokens_per_s_per_gpu:.2f} tokens/s per GPU, utilisation "
        f"{found.utilisation:.1%}",
        f"price ${found.price_usd_per_mtok:.4f} per Mtok, cost ${found.cost_usd_per_mtok:.4f} per Mtok, margin "
        f"{'-' if margin_usd < 0 else ''}${abs(margin_usd):.2f}",
        head,
    ]
    for name, model, row in rows:
        lines.append(
            f"{name:<{wide}} {model:<{long}} {row.tokens / 1e6:>10.3f} {row.machine_s:>10.1f} "
            f"{row.price_usd_per_mtok:>11.4f} {row.cost_usd_per_mtok:>11.4f} {row.margin_usd:>10.2f}"
        )
    return "\n".join(lines)
