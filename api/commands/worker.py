"""`weftd worker`, a trainer or a generator for API replicas that share a Redis; `weftd migrate`: docs/production.md."""

from __future__ import annotations

import logging
import os
import socket

import click

from api.commands.places import Place, database_of, refuse, say_as, settings_of, where
from store import tracing

log = logging.getLogger(__name__)


@click.command()
@where
@click.argument("role", type=click.Choice(["trainer", "generator"]))
@click.option("--redis", metavar="URL", help="The Redis of the API replicas (default: redis_url of the settings).")
def worker(place: Place, role: str, redis: str | None) -> None:
    """Run a worker with this ROLE until SIGTERM, which lets it finish its work. Whatever supervises it starts it
    again."""
    from api.server.serve import CannotServe, read_cards
    from api.server.workers.memory_plan import planned
    from api.server.workers.worker_programs import lone_worker
    from store.blobs.opening import check_blobs
    from store.settings import SettingsError
    from workers.model.planning.plan import DoesNotFit

    settings = settings_of(place, redis_url=redis)
    if not settings.redis_url:
        refuse("no Redis is named: give --redis URL, or set redis_url in the settings")
    say_as(settings, role)
    try:
        tracing.configure(role)
        tracing.stop()  # the program that replaces this process sets up its own
        check_blobs(settings)
        cards = read_cards(settings.models)
        settings, tables = planned(settings, cards, role)
        models = {name: card.path for name, card in cards.items()}
        program = lone_worker(settings, models, role)
    except (CannotServe, SettingsError, tracing.TracingError, DoesNotFit) as error:
        refuse(error)
    for table in tables:
        log.info("the plan of memory (docs/operating.md):\n%s", table)
    ours, theirs = socket.socketpair()
    ours.sendall(program.first_word)  # it waits in the link for the program that replaces this process
    os.set_inheritable(theirs.fileno(), True)
    os.environ.update(program.environment)
    os.execv(program.command[0], [*program.command, "--link-fd", str(theirs.fileno())])


@click.command()
@where
def migrate(place: Place) -> None:
    """Bring the database up to date, and exit. Run it before servers of a new version start."""
    with database_of(place, may_be_new=True):
        click.echo("the database is up to date")
