"""`weftd`, the operator's command.

What a script needs goes to stdout and nothing else does: `serve` prints one line, `ready http://H:P`, and `key create`
prints one key. Everything else, logs and errors, goes to stderr. A mistake of the operator is one line and exit code 2;
what is no mistake, and may go well when it is tried again, has another code.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from pathlib import Path

import click
from weft.version import __version__

from api.commands.places import Place, code_of, refuse, say_as, settings_of, where
from workers.leave import let_go

#: By command: the module, and the text in `weftd --help`. Only the module of the command that runs is imported: a
#: server that restarts needs no other, and `--help` needs none.
COMMANDS = {
    "adapter": ("stored.adapter", "Import adapters trained by other tools."),
    "alert": ("money.alerts", "What a person should know of payments, invoices and jobs."),
    "audit": ("people.audit", "The audit log."),
    "backup": ("stored.backup", "Copy database, blobs and secret into a folder; the service may run."),
    "billing": ("money.credit", "How organisations pay; check the books."),
    "budget": ("money.credit", "Limits on spending."),
    "credit": ("money.credit", "Credit of organisations."),
    "doctor": ("doctor", "Find what is wrong with machine, stores or models, and what to do."),
    "jobs": ("jobs", "Periodic work of the server: billing, webhooks, expiry."),
    "key": ("people.key", "API keys of organisations."),
    "migrate": ("worker", "Bring the database up to date, before a new version starts."),
    "model": ("planning.plan", "Model folders."),
    "org": ("people.org", "Organisations."),
    "payments": ("money.payments", "Prepare the Stripe account for payments."),
    "plan": ("planning.plan", "Which settings of a model fit into memory."),
    "project": ("people.project", "Projects of organisations."),
    "repair": ("stored.repair", "Let a server start whose database has lost commits."),
    "restore": ("stored.backup", "Put a backup back into a new data folder."),
    "simulate": ("planning.simulate", "Waits, throughput and price of tenants on one cluster."),
    "tco": ("money.tco", "What making a token costs, and the margin in its price."),
    "user": ("people.user", "Members of organisations."),
    "worker": ("worker", "Run a trainer or a generator for servers elsewhere."),
}


class _Commands(click.Group):
    """The commands defined here, and those of COMMANDS, which are imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        found: click.Command = getattr(importlib.import_module(f"api.commands.{COMMANDS[cmd_name][0]}"), cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        here = {name: command.get_short_help_str(limit=200) for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted({**here, **{name: says for name, (_, says) in COMMANDS.items()}}.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="weftd", message="%(prog)s %(version)s")
def weftd() -> None:
    """Serve Weft, and hand out its keys."""
    # Files made from here on (database, weights, sockets; workers inherit this) are readable by their user alone.
    os.umask(0o077)


def _models(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """Base models from NAME=PATH arguments. A name may not contain `=`; a path may."""
    models: dict[str, Path] = {}
    for value in values:
        name, _, path = value.partition("=")
        if not name or not path:
            raise click.BadParameter(f"{value!r} is not NAME=PATH")
        if name in models:
            raise click.BadParameter(f"{name!r} is named twice")
        models[name] = Path(path)
    return models


@weftd.command()
@where
@click.option("--host", help="Address to listen on (default 127.0.0.1).")
@click.option("--port", type=int, help="Port to listen on (default 8000); 0 takes a free one.")
@click.option("--model", "models", metavar="NAME=PATH", callback=_models, multiple=True, help="A local model (repeat).")
@click.option("--engine", multiple=True, type=click.Choice(["torch", "vllm"]), help="A generator (repeat for more).")
@click.option("--trainer-ranks", type=int, help="Processes that are one trainer and share the base model (default 1).")
@click.option("--trainers", type=int, help="How many trainers (default 1).")
def serve(
    place: Place,
    host: str | None,
    port: int | None,
    models: dict[str, Path],
    engine: tuple[str, ...],
    trainer_ranks: int | None,
    trainers: int | None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Without --model it serves a tiny model that comes with Weft."""
    from api.server import serve as server
    from billing.prices import PriceError

    given = {"models": models or None, "engine": engine, "trainers": trainers, "trainer_ranks": trainer_ranks}
    settings = settings_of(place, host=host, port=port, **given)
    say_as(settings, "api")
    try:
        code = server.serve(settings)
    except (server.CannotServe, PriceError) as error:
        refuse(error)
    sys.exit(code)


def main() -> None:
    """The entry point. click's own errors, too, are one line and not a page of usage."""
    _open_what_is_closed()
    try:
        weftd.main(prog_name="weftd", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        refuse(" ".join(error.format_message().split()))
    except click.Abort:
        sys.exit(1)
    except UnicodeEncodeError as error:
        refuse(f"{error.object[:80]!r} is not UTF-8")
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        refuse(f"{error.filename or 'the output cannot be written'}: {error.strerror}", code_of(error))
    finally:
        let_go()


def _open_what_is_closed() -> None:
    """Have /dev/null for a closed stdin, stdout or stderr: workers need them, and other files would get their
    numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


if __name__ == "__main__":
    main()
