"""`weftd user`: members of organisations."""

from __future__ import annotations

import click
from sqlalchemy.orm import Session

from api.commands.changes import change, change_and_tell, check_org_name, member_id, organisation
from api.commands.places import Place, database_of, settings_of, where
from store.people import identities, organisations
from store.people.roles import ROLES


@click.group()
def user() -> None:
    """Members of organisations."""


@user.command()
@where
@click.option("--org", required=True, help="Name of the organisation; it is made if it is not there.")
@click.option("--email", required=True, help="Address of the person.")
@click.option("--role", type=click.Choice(ROLES), default="member", show_default=True)
def create(place: Place, org: str, email: str, role: str) -> None:
    """Make a person a member, and print the user's id. If they are one already, they get this role."""
    check_org_name(org)

    def write(session: Session) -> str:
        row = organisations.organisation_named(session, org)
        for _, member in organisations.members(session, row.id):
            if member.email == email.strip().lower():
                organisations.change_role(session, row.id, member.id, role)
                return member.id
        return organisations.add_member(session, row.id, email, role).id

    change_and_tell(place, write, may_be_new=True)


@user.command("list")
@where
@click.option("--org", required=True, help="Name of the organisation.")
def list_(place: Place, org: str) -> None:
    """Show the id, e-mail and role of an organisation's members."""
    with database_of(place) as database, database.read() as session:
        for member, person in organisations.members(session, organisation(session, org).id):
            click.echo(f"{person.id}\t{person.email}\t{member.role}")


@user.command()
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.option("--email", required=True, help="Address of the person.")
def remove(place: Place, org: str, email: str) -> None:
    """End a membership, and revoke the member's keys."""

    def write(session: Session) -> None:
        row = organisation(session, org)
        organisations.remove_member(session, row.id, member_id(session, row.id, email))

    change(place, write)


@user.command()
@where
@click.option("--email", required=True, help="Address of the person.")
def unlink(place: Place, email: str) -> None:
    """Forget which accounts of the OpenID provider belong to a person; the next account with their verified address
    will.

    Ends their sessions of the console. Memberships and keys stay: if the address is now somebody else's, end those
    first (weftd user remove)."""
    change_and_tell(place, lambda session: identities.unlink(session, email))


@user.command("login-link")
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.option("--email", required=True, help="Address of the member.")
@click.option("--operator", is_flag=True, help="Show the operator's pages too: all organisations, cost of ownership.")
@click.option("--url", help="Where browsers find the server (default: oidc.public_url, else its own address).")
def login_link(place: Place, org: str, email: str, operator: bool, url: str | None) -> None:
    """Print a link that signs a member in to the console, once, within a quarter of an hour."""
    from api.console.security import PREFIX
    from api.console.sessions import new_link
    from api.server.serve import server_at

    settings = settings_of(place)
    of_settings = f"http://{settings.host}:{settings.port}"
    base = (url or settings.oidc.public_url or server_at(settings.data_dir) or of_settings).rstrip("/")

    def write(session: Session) -> str:
        row = organisation(session, org)
        user_id = member_id(session, row.id, email, "make one with weftd user create")
        return f"{base}{PREFIX}/login/{new_link(session, row.id, user_id, operator=operator)}"

    change_and_tell(place, write)
