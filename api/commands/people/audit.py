"""`weftd audit`: whether anybody has tampered with the audit log."""

from __future__ import annotations

import sys

import click
from sqlalchemy import select

from api.commands.changes import organisation
from api.commands.places import Place, database_of, refuse, where
from store.database import audit as log
from store.tables import Organisation


@click.group()
def audit() -> None:
    """The audit log."""


@audit.command()
@where
@click.option("--org", help="One organisation only.")
@click.option("--head", help="A head printed earlier; fails unless the log of --org still has it.")
def verify(place: Place, org: str | None, head: str | None) -> None:
    """Recompute the hash chain of each organisation's entries, and print its head.

    Keep the head elsewhere: given back with --head, it shows whether entries were cut off the end. Exit code 1 if
    something is wrong."""
    if head is not None and org is None:
        refuse("--head needs --org: every organisation has a chain of its own")
    good = True
    with database_of(place) as database, database.read() as session:
        query = select(Organisation).order_by(Organisation.created_at, Organisation.id)
        orgs = [organisation(session, org)] if org is not None else list(session.scalars(query))
        for row in orgs:
            verdict = log.verify(session, row.id, head)
            click.echo(f"{row.name}\t{verdict.entries}\t{verdict.head or '-'}")
            for problem in verdict.problems:
                click.echo(f"weftd: {row.name}: {problem}", err=True)
            good = good and not verdict.problems
    sys.exit(0 if good else 1)
