"""Commands that only read: each asks the server once (or again and again with --watch) and prints a table, or JSON."""

from __future__ import annotations

import time

import click

from weft.cli import tables
from weft.cli.shell import RunParameter, Server, as_json, main, show
from weft.version import __version__

WATCH_S = 2.0


@main.command()
@click.option("--run", "run_id", type=RunParameter(), help="Only this run, by id or name.")
@click.option("--watch", is_flag=True, help="Keep showing it.")
@as_json
@click.pass_obj
def usage(rest: Server, run_id: str | None, watch: bool, json_: bool) -> None:
    """Tokens and dollars, by run and kind."""
    client = rest()
    if not watch:
        show(client.get_usage(run_id).result(), json_, tables.usage)
        return
    from rich.live import Live

    with Live(console=tables.console(), auto_refresh=False) as live:
        while True:
            live.update(tables.usage(client.get_usage(run_id).result()), refresh=True)
            time.sleep(WATCH_S)


@main.command()
@click.argument("run_id", metavar="RUN", type=RunParameter())
@as_json
@click.pass_obj
def cost(rest: Server, run_id: str, json_: bool) -> None:
    """What RUN has cost so far."""
    show(rest().get_usage(run_id).result(), json_, tables.usage)


@main.command()
@as_json
@click.pass_obj
def balance(rest: Server, json_: bool) -> None:
    """What you have spent, this month and in all, and what is left if the server keeps credits."""
    show(rest().get_balance().result(), json_, tables.balance)


@main.command()
@as_json
@click.pass_obj
def budget(rest: Server, json_: bool) -> None:
    """Your budgets: what is spent, held for running operations and left of each now."""
    show(rest().get_budgets().result(), json_, tables.budgets)


@main.command()
@click.option("--before", type=int, help="Show the entries before this number.")
@as_json
@click.pass_obj
def ledger(rest: Server, before: int | None, json_: bool) -> None:
    """Movements of your balance, newest first."""
    show(rest().get_ledger(before).result(), json_, tables.ledger)


@main.command()
@click.argument("model")
@as_json
@click.pass_obj
def prices(rest: Server, model: str, json_: bool) -> None:
    """What a million tokens of MODEL cost now."""
    show(rest().get_prices(model).result(), json_, tables.prices)


@main.command()
@as_json
@click.pass_obj
def models(rest: Server, json_: bool) -> None:
    """Base models that the server serves."""
    show(rest().get_server_capabilities().result(), json_, tables.models)


@main.command()
@click.option("--limit", default=20, show_default=True, help="How many, newest first.")
@as_json
@click.pass_obj
def runs(rest: Server, limit: int, json_: bool) -> None:
    """Training runs."""
    show(rest().list_training_runs(limit=limit).result(), json_, tables.runs)


@main.command()
@click.argument("run_id", metavar="RUN", type=RunParameter())
@click.option("--window", default=3600.0, show_default=True, help="Seconds to look back.")
@as_json
@click.pass_obj
def health(rest: Server, run_id: str, window: float, json_: bool) -> None:
    """How RUN's loop is doing, and what it waits for."""
    show(rest().get_run_health(run_id, window).result(), json_, tables.health)


@main.command()
@as_json
@click.pass_obj
def stats(rest: Server, json_: bool) -> None:
    """How the server is doing: passes, shared passes, slot occupancy, queue."""
    show(rest().get_stats().result().model_dump(mode="json", exclude_unset=True), json_, tables.stats)


@main.command()
def version() -> None:
    """Version of this client."""
    click.echo(f"weft {__version__}")
