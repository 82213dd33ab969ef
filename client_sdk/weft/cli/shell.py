"""What all commands share: the group with its options, errors as one line, tables or JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

import click
from pydantic import BaseModel, ValidationError
from rich.table import Table

from weft.cli import tables
from weft.errors import WeftError
from weft.rest_client import RestClient
from weft.service_client import ServiceClient
from weft.transport.retry import RetryPolicy

P = ParamSpec("P")

#: A person waits: give up on a dead server soon, and do not wait for money.
POLICY = RetryPolicy(budget_s=5.0, billing_budget_s=0.0)


@dataclass(frozen=True)
class Server:
    """The server that the commands ask; calling it gives the client that most of them need."""

    base_url: str | None
    api_key: str | None

    def __call__(self) -> RestClient:
        return RestClient(base_url=self.base_url, api_key=self.api_key, policy=POLICY)

    def service(self) -> ServiceClient:
        """For what needs a session."""
        return ServiceClient(base_url=self.base_url, api_key=self.api_key, retry=POLICY, display_name="weft command")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--base-url", help="Address of the server; else WEFT_BASE_URL or TINKER_BASE_URL.")
@click.option("--api-key", help="API key; else WEFT_API_KEY or TINKER_API_KEY.")
@click.pass_context
def main(context: click.Context, base_url: str | None, api_key: str | None) -> None:
    """Weft: runs, checkpoints and costs on a fine-tuning server."""
    context.obj = Server(base_url, api_key)


def command(function: Callable[P, None]) -> Callable[P, None]:
    """A command whose errors are one line on stderr and exit code 1."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (WeftError, ValidationError, ValueError, OSError) as error:
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
