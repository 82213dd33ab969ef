"""`weftd org`: organisations, their state, their weight, their rate limits and their quotas."""

from __future__ import annotations

import click
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.commands.changes import change, change_and_tell, check_org_name, organisation
from api.commands.people import org_data
from api.commands.places import Place, database_of, refuse, settings_of, where
from billing.metering.quotas import QUOTAS, Standing, standings
from store.people import organisations
from store.tables import Organisation

_REQUESTS, _TOKENS, _IN_FLIGHT = (click.IntRange(0, most) for most in organisations.LIMITS.values())


@click.group()
def org() -> None:
    """Organisations."""


org.add_command(org_data.export)
org.add_command(org_data.delete)


@org.command()
@where
@click.argument("name")
def create(place: Place, name: str) -> None:
    """Make an organisation, and print its id. An existing one is left unchanged."""
    check_org_name(name)
    change_and_tell(place, lambda session: organisations.organisation_named(session, name).id, True)


@org.command("list")
@where
def list_(place: Place) -> None:
    """Show the id, name, state and weight of every organisation."""
    with database_of(place) as database, database.read() as session:
        for row in session.scalars(select(Organisation).order_by(Organisation.created_at, Organisation.id)):
            click.echo(f"{row.id}\t{row.name}\t{row.status}\t{row.weight}")


@org.command()
@where
@click.argument("name")
@click.argument("status", type=click.Choice(organisations.STATUSES))
def status(place: Place, name: str, status: str) -> None:
    """Set the state of an organisation. If it is suspended or closed, every request of it is refused within seconds."""
    change(place, lambda session: organisations.set_status(session, organisation(session, name), status))


@org.command()
@where
@click.argument("name")
@click.argument("weight", type=click.IntRange(1, 1000))
def weight(place: Place, name: str, weight: int) -> None:
    """Set an organisation's fair share of the machines, relative to others'."""
    change(place, lambda session: organisations.set_weight(session, organisation(session, name), weight))


@org.command()
@where
@click.argument("name")
@click.argument("how", type=click.Choice(("required", "optional")))
def sso(place: Place, name: str, how: str) -> None:
    """Set whether members must sign in to the console by the OpenID provider. Links that an operator makes always
    work."""
    required = how == "required"
    if required and not settings_of(place).oidc.on:
        refuse("no oidc.issuer is set, so nobody could sign in: set it first, or name its --config (docs/sign-in.md)")
    change(place, lambda session: organisations.require_sso(session, organisation(session, name), required))


@org.command()
@where
@click.argument("name")
@click.option("--requests-per-minute", type=_REQUESTS, help="0: no limit; not given: unchanged.")
@click.option("--tokens-per-minute", type=_TOKENS, help="0: no limit; not given: unchanged.")
@click.option("--max-in-flight", type=_IN_FLIGHT, help="Samples and runs at a time; 0: no limit; not given: unchanged.")
def limits(place: Place, name: str, **given: int | None) -> None:
    """Set the rate limits of an organisation, and print them."""
    values = {limit: value or None for limit, value in given.items() if value is not None}

    def write(session: Session) -> Organisation:
        row = organisation(session, name)
        if values:
            organisations.set_limits(session, row, values)
        return row

    row = change(place, write)
    for limit in organisations.LIMITS:
        click.echo(f"{limit}\t{getattr(row, limit) or 'none'}")


@org.command()
@where
@click.argument("name")
@click.option("--set", "changes", multiple=True, metavar="QUOTA=VALUE", help="A number, or `default`. May be repeated.")
def quota(place: Place, name: str, changes: tuple[str, ...]) -> None:
    """Set how much an organisation may keep at a time. Prints each quota, what is used of it, and whether it was set
    here or is the default."""
    values = dict(_quota(text) for text in changes)
    limits = settings_of(place).limits

    def write(session: Session) -> list[str]:
        row = organisation(session, name)
        if values:
            organisations.set_quotas(session, row, values)
            session.flush()
        return [_shown(row, standing) for standing in standings(session, row.id, limits)]

    click.echo("\n".join(change(place, write)))


def _shown(row: Organisation, standing: Standing) -> str:
    used = "-" if standing.used is None else standing.used
    whose = "set" if standing.name in row.quotas else "default"
    return f"{standing.name}\t{standing.limit}\t{used}\t{whose}"


def _quota(text: str) -> tuple[str, int | None]:
    name, _, value = text.partition("=")
    if name not in QUOTAS:
        refuse(f"--set: {name[:80]!r} is no quota; there are {', '.join(QUOTAS)}")
    if value != "default" and not (value.isascii() and value.isdecimal() and len(value) <= 18):
        refuse(f"--set {name}: {value[:80]!r} must be a whole number, 0 or more, or `default`")
    return name, None if value == "default" else int(value)
