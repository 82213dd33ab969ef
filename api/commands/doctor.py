"""`weftd doctor`: whether a service with these settings would run here, or runs well; what is wrong, what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import click

from api.commands.places import Place, settings_of, where
from api.doctor import machine, models, sign_in, stores
from api.doctor.findings import Finding, wrong
from store import logs
from store.settings import Settings

CHECKS: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
    machine.disk,
    machine.permissions,
    machine.open_files,
    machine.server,
    stores.database,
    stores.login,
    stores.blobs,
    stores.redis,
    stores.workers,
    stores.clocks,
    stores.jobs,
    sign_in.provider,
    models.prices,
    models.models,
    models.engines,
    machine.computing,
)


@click.command()
@where
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def doctor(place: Place, as_json: bool) -> None:
    """Check disk, permissions, database, object store, Redis, clocks, jobs, sign-in, prices, models, GPU and kernels;
    change nothing. Prints a line for each, and below a fault how to mend it. Exit code 1 if something is wrong;
    warnings alone are 0."""
    settings = settings_of(place)
    bad = False
    for check in CHECKS:
        for found in _of(check, settings):
            bad = bad or found.state == "wrong"
            if as_json:
                click.echo(json.dumps(asdict(found)))
                continue
            click.echo(f"{found.state:8} {found.about:12} {found.says}")
            if found.remedy:
                click.echo(f"{'':21} -> {found.remedy}")
    sys.exit(1 if bad else 0)


def _of(check: Callable[[Settings], Iterator[Finding]], settings: Settings) -> Iterator[Finding]:
    """The findings of one check. A check that fails is itself a finding, and does not prevent the others."""
    try:
        yield from check(settings)
    except Exception as error:
        says = f"cannot be looked at: {type(error).__name__}: {logs.in_a_line(error)}"
        yield wrong(check.__name__, says, "mend what is above first")
