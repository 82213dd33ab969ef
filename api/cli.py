"""`weftd`, the operator's command.

What a script needs goes to stdout and nothing else does: `serve` prints one line, `ready http://H:P`, and `key create`
prints one key. Everything else, logs and errors, goes to stderr. A mistake of the operator is one line and exit code 2.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from api.commands.adapter import adapter
from api.commands.audit import audit
from api.commands.credit import billing, budget, credit
from api.commands.jobs import jobs
from api.commands.key import key
from api.commands.login_link import login_link
from api.commands.org import org
from api.commands.payments import payments
from api.commands.places import refuse, settings_of, where
from api.commands.project import project
from api.commands.repair import repair
from api.commands.simulate import simulate
from api.commands.tco import tco
from api.commands.user import user
from api.commands.worker import migrate, worker


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
@click.option("--engine", multiple=True, type=click.Choice(["torch", "vllm"]), help="A generator (repeat for more).")
def serve(
    data_dir: Path | None,
    config: Path | None,
    host: str | None,
    port: int | None,
    models: dict[str, Path],
    engine: tuple[str, ...],
) -> None:
    """Serve until SIGTERM or Ctrl-C. Without --model it serves a tiny model that comes with Weft."""
    from api import serve as server
    from billing.prices import PriceError

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    settings = settings_of(config, data_dir, host=host, port=port, models=models or None, engine=engine)
    try:
        code = server.serve(settings)
    except (server.CannotServe, PriceError) as error:
        refuse(str(error))
    sys.exit(code)


weftd.add_command(adapter)
weftd.add_command(audit)
weftd.add_command(billing)
weftd.add_command(budget)
weftd.add_command(credit)
weftd.add_command(jobs)
weftd.add_command(key)
weftd.add_command(org)
weftd.add_command(payments)
weftd.add_command(project)
weftd.add_command(repair)
weftd.add_command(user)
user.add_command(login_link)
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
