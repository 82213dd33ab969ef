"""`weftd alert`: what a person should know, and has seen to (docs/payments.md)."""

from __future__ import annotations

from datetime import UTC, datetime

import click
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.commands.changes import change
from api.commands.places import Place, database_of, refuse, where
from billing.money.alerts import resolve_alert
from store.database import audit
from store.tables import Alert, Organisation


@click.group()
def alert() -> None:
    """What a person should know."""


@alert.command("list")
@where
def list_(place: Place) -> None:
    """Show the alerts that are not over, the oldest first."""
    query = select(Alert, Organisation.name).outerjoin(Organisation, Organisation.id == Alert.org_id)
    with database_of(place) as database, database.read() as session:
        for row, name in session.execute(query.where(Alert.resolved_at.is_(None)).order_by(Alert.id)):
            whose = name or "the operator"
            click.echo(f"{row.id}\t{row.raised_at:%Y-%m-%d %H:%M}\t{row.kind}\t{whose}\t{row.message}")


@alert.command()
@where
@click.argument("alert_id", type=int)
def resolve(place: Place, alert_id: int) -> None:
    """Mark an alert as over, for example once what it asks for is booked."""

    def write(session: Session) -> bool:
        row = session.get(Alert, alert_id)
        if row is None or row.resolved_at is not None:
            return False
        resolve_alert(session, kind=row.kind, ref=row.ref, now=datetime.now(UTC))
        if row.org_id is not None:
            audit.record(
                session, org_id=row.org_id, key_id=None, event="alert_resolved", target=f"{row.kind} {row.ref}"
            )
        return True

    if not change(place, write):
        refuse(f"no alert {alert_id} that is not over: see weftd alert list")
