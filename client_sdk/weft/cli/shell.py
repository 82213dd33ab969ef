"""What all commands share: the group with its options, errors as one line, tables or JSON.

Each command imports the clients that it needs, so that help, completion and a mistyped command stay fast.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weft.cli import tables
from weft.errors import (
    APIConnectionError,
    AuthenticationError,
    BillingError,
    GoneError,
    InternalServerError,
    NoKeyError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    WeftError,
)
from weft.transport.retry import RetryPolicy
from weft.version import __version__

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.table import Table

    from weft.rest_client import RestClient
    from weft.service_client import ServiceClient

A = TypeVar("A", bound="BaseModel | dict[str, Any]")

#: A person waits: give up on a dead server soon, and do not wait for money.
POLICY = RetryPolicy(budget_s=5.0, billing_budget_s=0.0)


EXIT_NOT_FOUND = 4
#: Exit codes by kind of error, for scripts. 1 is any other error, 2 a command that click did not understand.
EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (NoKeyError, 3),
    (AuthenticationError, 3),
    (PermissionDeniedError, 3),
    (NotFoundError, EXIT_NOT_FOUND),
    (GoneError, EXIT_NOT_FOUND),
    (BillingError, 5),
    (APIConnectionError, 6),
    (InternalServerError, 6),
    (RateLimitError, 6),
    (ValueError, 2),
)
#: How many of the latest runs are searched for a name.
NAMES_AMONG = 1000


@dataclass(frozen=True)
class Server:
    """The server that the commands ask; calling it gives the client that most of them need."""

    base_url: str | None
    api_key: str | None

    def __call__(self) -> RestClient:
        from weft.rest_client import RestClient

        return RestClient(base_url=self.base_url, api_key=self.api_key, policy=POLICY)

    def service(self) -> ServiceClient:
        """The client of a command that needs a session."""
        from weft.service_client import ServiceClient

        return ServiceClient(base_url=self.base_url, api_key=self.api_key, retry=POLICY, display_name="weft command")


class Failed(click.ClickException):
    """A command failed: one line is printed on stderr, and the command ends with this exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]


class RunParameter(click.ParamType):  # type: ignore[type-arg]  # has no parameter before click 8.4
    """A run, by its id or by its name (`name=` where it was made); commands get the id."""

    name = "run"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if ":" in value or ctx is None:
            return value
        listed = ctx.obj().list_training_runs(limit=NAMES_AMONG, access_scope="accessible").result()
        found = [run.training_run_id for run in listed.training_runs if run.name == value]
        if len(found) > 1:
            self.fail(f"{len(found)} runs are called {value!r}; give the id of one: {', '.join(found)}", param, ctx)
        if not found:
            raise Failed(
                f"no run is called {value!r} (of the latest {NAMES_AMONG:,}); `weft runs` lists them",
                EXIT_NOT_FOUND,
            )
        return str(found[0])


class _Guarded(click.Group):
    """Commands whose errors are one line on stderr and an exit code of their kind."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:  # also for errors in printing help, which happens outside of the commands
            why = error.strerror or error
            told = f"{error.filename}: {why}: name a place that can be read and written"
            click.echo(f"Error: {told if error.filename else f'the output cannot be written: {why}'}", err=True)
            # What stdout still holds: Python would write it once more at its end, and exit with 120.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (WeftError, ValueError) as error:
            code = next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1)
            raise Failed(" ".join(str(error).split()), code) from error
        except KeyboardInterrupt:
            raise SystemExit(130) from None


@click.group(cls=_Guarded, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="weft", message="%(prog)s %(version)s")
@click.option("--base-url", help="Address of the server; else WEFT_BASE_URL or TINKER_BASE_URL.")
@click.option("--api-key", help="API key; else WEFT_API_KEY or TINKER_API_KEY.")
@click.pass_context
def main(context: click.Context, base_url: str | None, api_key: str | None) -> None:
    """Weft: runs, checkpoints and costs on a fine-tuning server."""
    context.obj = Server(base_url, api_key)


as_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


def print_table(table: Table) -> None:
    """Print without folding: ids and paths are there to be copied, so a narrow terminal wraps whole lines instead."""
    needed = tables.console(width=10_000).measure(table).maximum
    terminal = tables.console()
    tables.console(width=max(needed, terminal.width)).print(table)


def show(answer: A, json_: bool, table: Callable[[A], Table]) -> None:
    """Print `answer` as JSON, or as its table."""
    if json_:
        body = answer if isinstance(answer, dict) else answer.model_dump(mode="json")
        click.echo(json.dumps(body, indent=2))
    else:
        print_table(table(answer))
