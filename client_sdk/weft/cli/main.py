"""Commands. Each asks the server once (or, watching, again and again) and prints a table, or JSON with `--json`."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any, ParamSpec

import click
from pydantic import BaseModel, ValidationError
from rich.live import Live
from rich.table import Table

from weft.cli import tables
from weft.errors import WeftError
from weft.rest_client import RestClient
from weft.retry import RetryPolicy
from weft.version import __version__

P = ParamSpec("P")

#: A person waits: give up on a dead server soon, and do not wait for money.
POLICY = RetryPolicy(budget_s=5.0, billing_budget_s=0.0)
WATCH_S = 2.0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--base-url", help="Address of the server; else WEFT_BASE_URL or TINKER_BASE_URL.")
@click.option("--api-key", help="API key; else WEFT_API_KEY or TINKER_API_KEY.")
@click.pass_context
def main(context: click.Context, base_url: str | None, api_key: str | None) -> None:
    """Weft: runs, checkpoints and costs on a fine-tuning server."""
    context.obj = lambda: RestClient(base_url=base_url, api_key=api_key, policy=POLICY)


def command(function: Callable[P, None]) -> Callable[P, None]:
    """A command whose errors are one line on stderr and exit code 1."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (WeftError, ValidationError, ValueError) as error:
            raise click.ClickException(" ".join(str(error).split())) from error
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    return guarded


as_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


def print_table(table: Table) -> None:
    """Print without folding: ids and paths are there to be copied, so a narrow terminal wraps whole lines instead."""
    needed = tables.console(width=10_000).measure(table).maximum
    terminal = tables.console()
    tables.console(width=max(needed, terminal.width)).print(table)


def show(answer: BaseModel | dict[str, Any], json_: bool, table: Callable[[], Table]) -> None:
    """Print `answer` as JSON, or as the table."""
    if json_:
        body = answer.model_dump(mode="json") if isinstance(answer, BaseModel) else answer
        click.echo(json.dumps(body, indent=2))
    else:
        print_table(table())


@main.command()
@click.option("--run", "run_id", help="Only this run.")
@click.option("--watch", is_flag=True, help="Keep showing it.")
@as_json
@click.pass_obj
@command
def usage(rest: Callable[[], RestClient], run_id: str | None, watch: bool, json_: bool) -> None:
    """Tokens and dollars, by run and kind."""
    client = rest()
    if not watch:
        answer = client.get_usage(run_id).result()
        show(answer, json_, lambda: tables.usage(answer))
        return
    with Live(console=tables.console(), auto_refresh=False) as live:
        while True:
            live.update(tables.usage(client.get_usage(run_id).result()), refresh=True)
            time.sleep(WATCH_S)


@main.command()
@as_json
@click.pass_obj
@command
def models(rest: Callable[[], RestClient], json_: bool) -> None:
    """Base models that the server serves."""
    answer = rest().get_server_capabilities().result()
    show(answer, json_, lambda: tables.models(answer))


@main.command()
@click.option("--limit", default=20, show_default=True, help="How many, newest first.")
@as_json
@click.pass_obj
@command
def runs(rest: Callable[[], RestClient], limit: int, json_: bool) -> None:
    """Training runs."""
    answer = rest().list_training_runs(limit=limit).result()
    show(answer, json_, lambda: tables.runs(answer))


@main.command()
@click.option("--run", "run_id", help="Only this run.")
@click.option("--limit", default=100, show_default=True, help="How many, newest first.")
@as_json
@click.pass_obj
@command
def checkpoints(rest: Callable[[], RestClient], run_id: str | None, limit: int, json_: bool) -> None:
    """Saved weights."""
    client = rest()
    listed = client.list_checkpoints(run_id) if run_id else client.list_user_checkpoints(limit)
    answer = listed.result()
    show(answer, json_, lambda: tables.checkpoints(answer))


@main.command()
@as_json
@click.pass_obj
@command
def stats(rest: Callable[[], RestClient], json_: bool) -> None:
    """How the server is doing: passes, shared passes, slot occupancy, queue."""
    answer = rest().get_stats().result()
    show(answer, json_, lambda: tables.stats(answer))


@main.command()
def version() -> None:
    """Version of this client."""
    click.echo(f"weft {__version__}")
