"""`weftd key`: API keys of organisations. `create` prints the key and nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.commands.changes import change, change_and_tell, check_org_name, member_id
from api.commands.places import Place, database_of, is_new, refuse, settings_of, where
from store.people import keys, organisations
from store.people.roles import ADMIN, SCOPES
from store.tables import ApiKey


@click.group()
def key() -> None:
    """API keys of organisations."""


@key.command()
@where
@click.option("--org", required=True, help="Name of the organisation; it is made if it is not there.")
@click.option("--name", default="", help="Name of the key.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(sorted(SCOPES)),
    multiple=True,
    help="What the key may do; may be repeated (default: everything).",
)
@click.option("--project", help="Id of the project that the key is bound to.")
@click.option("--user", "email", help="E-mail of the member that the key belongs to.")
@click.option("--days", type=click.IntRange(1, 3660), help="Days until the key expires.")
def create(
    place: Place, org: str, name: str, scopes: tuple[str, ...], project: str | None, email: str | None, days: int | None
) -> None:
    """Print a new key. It cannot be shown again."""
    check_org_name(org)
    if len(name) > 128 or not name.isprintable():
        refuse("--name must be at most 128 printable characters")

    def write(session: Session) -> str:
        org_id = organisations.organisation_named(session, org).id
        if project is not None:
            organisations.project_by_id(session, org_id, project)
        _, secret = keys.new_key(
            session,
            org_id,
            name=name,
            scopes=scopes or (ADMIN,),
            project_id=project,
            user_id=member_id(session, org_id, email) if email is not None else None,
            expires_at=datetime.now(UTC) + timedelta(days=days) if days is not None else None,
        )
        return secret

    settings = settings_of(place)
    fresh = is_new(settings)
    change_and_tell(place, write, may_be_new=True)
    if fresh:
        click.echo(f"weftd: {settings.data_dir} is new: the key is good for a server that is started on it", err=True)


@key.command()
@where
@click.argument("prefix")
def revoke(place: Place, prefix: str) -> None:
    """Revoke the key that starts with PREFIX, as `key list` shows it."""
    if not change(place, lambda session: keys.revoke(session, prefix)):
        refuse(f"no key in use starts with {prefix[:12]!r}: see weftd key list")


@key.command()
@where
@click.argument("prefix")
@click.option(
    "--overlap-hours",
    type=click.IntRange(0, 720),
    default=24,
    show_default=True,
    help="How long the old secret still works.",
)
def rotate(place: Place, prefix: str, overlap_hours: int) -> None:
    """Print another secret for the key that starts with PREFIX."""

    def write(session: Session) -> str:
        rows = session.scalars(select(ApiKey).where(ApiKey.prefix == prefix[:12])).all()
        good = [row for row in rows if keys.is_good(row)]
        if len(good) != 1:
            raise organisations.NoSuch(f"no key in use starts with {prefix[:12]!r}: see weftd key list")
        return keys.rotate(session, good[0], timedelta(hours=overlap_hours))

    change_and_tell(place, write)


@key.command("list")
@where
def list_(place: Place) -> None:
    """Show the prefix, organisation, date, state and number of every key."""
    with database_of(place) as database, database.read() as session:
        for org, row in keys.list_keys(session):
            click.echo(f"{row.prefix}\t{org.name}\t{row.created_at:%Y-%m-%d}\t{_state(row)}\t{row.id}")


def _state(row: ApiKey) -> str:
    if row.revoked_at is not None:
        return f"revoked {row.revoked_at:%Y-%m-%d}"
    if row.expires_at is not None and not keys.is_good(row):
        return f"expired {row.expires_at:%Y-%m-%d}"
    return "active"
