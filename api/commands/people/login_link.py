"""`weftd user login-link`: a way into the console, for once."""

from __future__ import annotations

from pathlib import Path

import click
from sqlalchemy.orm import Session

from api.commands.changes import change, member_id, organisation
from api.commands.places import settings_of, where


@click.command("login-link")
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.option("--email", required=True, help="Which of its members.")
@click.option("--operator", is_flag=True, help="Show the operator's pages too: all organisations, cost of ownership.")
@click.option("--url", help="Where browsers find the server (default: host and port of the settings).")
def login_link(
    data_dir: Path | None, config: Path | None, org: str, email: str, operator: bool, url: str | None
) -> None:
    """Print a link that signs a member in to the console, once, within a quarter of an hour."""
    from api.console.security import PREFIX
    from api.console.sessions import new_link

    settings = settings_of(config, data_dir)
    base = (url or f"http://{settings.host}:{settings.port}").rstrip("/")

    def write(session: Session) -> str:
        row = organisation(session, org)
        user_id = member_id(session, row.id, email, "make one with weftd user create")
        return new_link(session, row.id, user_id, operator=operator)

    click.echo(f"{base}{PREFIX}/login/{change(data_dir, config, write)}")
