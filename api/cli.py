"""`weftd`, the operator's command.

What a script needs goes to stdout and nothing else does: `serve` prints one line, `ready http://H:P`, and `key create`
prints one key. Everything else, logs and errors, goes to stderr. A mistake of the operator is one line and exit code 2.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from api.commands.credit import billing, budget, credit
from api.commands.jobs import jobs
from api.commands.places import database_of, refuse, settings_of, where
from api.commands.simulate import simulate
from api.commands.tco import tco
from api.commands.worker import migrate, worker
from store import keys


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def weftd() -> None:
    """Serve Weft, and hand out its keys."""


def _models(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """From NAME=PATH, each. The name may not hold a `=`; the path may."""
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
def serve(
    data_dir: Path | None, config: Path | None, host: str | None, port: int | None, models: dict[str, Path]
) -> None:
    """Serve until SIGTERM or Ctrl-C. Without --model it serves a tiny model that comes with Weft."""
    from api import serve as server
    from billing.prices import PriceError

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    settings = settings_of(config, data_dir, host=host, port=port, models=models or None)
    try:
        code = server.serve(settings)
    except (server.CannotServe, PriceError) as error:
        refuse(str(error))
    sys.exit(code)


@weftd.group()
def key() -> None:
    """API keys of organisations."""


@key.command()
@where
@click.option("--org", required=True, help="Name of the organisation; it is made if it is not there.")
def create(data_dir: Path | None, config: Path | None, org: str) -> None:
    """Print a new key. It cannot be shown again."""
    if not 1 <= len(org) <= 128 or not org.isprintable() or org != org.strip():
        refuse("--org must be 1 to 128 printable characters without spaces around them")
    with database_of(config, data_dir) as database:
        click.echo(database.write_now(lambda session: keys.create_key(session, org)))


@key.command()
@where
@click.argument("prefix")
def revoke(data_dir: Path | None, config: Path | None, prefix: str) -> None:
    """Revoke the key that starts with PREFIX, as `key list` shows it."""
    with database_of(config, data_dir) as database:
        revoked = database.write_now(lambda session: keys.revoke(session, prefix))
    if not revoked:
        refuse(f"no key in use starts with {prefix[:12]!r}: see weftd key list")


@key.command("list")
@where
def list_(data_dir: Path | None, config: Path | None) -> None:
    """Show the prefix, organisation, date and state of every key."""
    with database_of(config, data_dir) as database, database.read() as session:
        for org, row in keys.list_keys(session):
            state = f"revoked {row.revoked_at:%Y-%m-%d}" if row.revoked_at else "active"
            click.echo(f"{row.prefix}\t{org.name}\t{row.created_at:%Y-%m-%d}\t{state}")


weftd.add_command(billing)
weftd.add_command(budget)
weftd.add_command(credit)
weftd.add_command(jobs)
weftd.add_command(migrate)
weftd.add_command(worker)
weftd.add_command(simulate)
weftd.add_command(tco)


def main() -> None:
    """The entry point: click's own errors, too, are one line and not a page of usage."""
    try:
        weftd.main(prog_name="weftd", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        refuse(error.format_message())
    except click.Abort:
        sys.exit(1)


if __name__ == "__main__":
    main()
