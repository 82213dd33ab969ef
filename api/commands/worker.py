"""`weftd worker`, a trainer or a generator for API replicas that share a Redis; `weftd migrate`: docs/production.md."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from api.commands.places import database_of, refuse, settings_of, where


@click.command()
@where
@click.argument("role", type=click.Choice(["trainer", "generator"]))
@click.option("--redis", metavar="URL", help="The Redis of the API replicas (default: redis_url of the settings).")
def worker(data_dir: Path | None, config: Path | None, role: str, redis: str | None) -> None:
    """Work as ROLE until SIGTERM, which lets it finish what it has. Whatever supervises it starts it again."""
    from api.server.serve import CannotServe, read_cards, worker_programs

    settings = settings_of(config, data_dir, redis_url=redis)
    if not settings.redis_url:
        refuse("there is no Redis to come to: give --redis URL, or redis_url in the settings")
    try:
        cards = read_cards(settings.models)
        programs = worker_programs(settings, cards)
    except CannotServe as error:
        refuse(str(error))
    program = next(program for program in programs if program.role == role)
    command = [*program.command, "--redis", settings.redis_url]
    if "--vllm-folder" in command:  # its own: the data folder is for all
        command += ["--vllm-folder", tempfile.mkdtemp(prefix="weft-vllm-")]
    os.environ.update(program.environment)
    sys.stdout.flush()
    os.execv(command[0], command)


@click.command()
@where
def migrate(data_dir: Path | None, config: Path | None) -> None:
    """Bring the database up to date, and exit: before the servers of a new version start."""
    with database_of(config, data_dir):
        click.echo("the database is up to date")
