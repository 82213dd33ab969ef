"""`weftd project`: projects of organisations."""

from __future__ import annotations

import click
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.commands.changes import change, change_and_tell, organisation
from api.commands.places import Place, database_of, where
from store.people import organisations
from store.tables import Project


@click.group()
def project() -> None:
    """Projects of organisations."""


@project.command()
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.argument("name")
def create(place: Place, org: str, name: str) -> None:
    """Make a project, and print its id."""
    change_and_tell(place, lambda s: organisations.create_project(s, organisation(s, org).id, name).id)


@project.command()
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.argument("project_id")
@click.option("--restore", is_flag=True, help="Undo the archiving.")
def archive(place: Place, org: str, project_id: str, restore: bool) -> None:
    """Archive a project: it takes no more sessions."""

    def write(session: Session) -> None:
        row = organisations.project_by_id(session, organisation(session, org).id, project_id)
        organisations.archive_project(session, row, not restore)

    change(place, write)


@project.command("list")
@where
@click.option("--org", required=True, help="Name of the organisation.")
def list_(place: Place, org: str) -> None:
    """Show the id, name and state of an organisation's projects."""
    with database_of(place) as database, database.read() as session:
        org_id = organisation(session, org).id
        for row in session.scalars(select(Project).filter_by(org_id=org_id).order_by(Project.name)):
            click.echo(f"{row.id}\t{row.name}\t{'archived' if row.archived_at else 'active'}")
