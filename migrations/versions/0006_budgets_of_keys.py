"""Budgets of keys are of the number that work is counted by: one of key "01" was never found, and limited nothing."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

from store.database.row_security import SERVICE_ROLE
from store.tables.base import Utc

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

Budget = dict[str, Any]
_SHIELDED = "SELECT 1 FROM pg_policies WHERE tablename = 'budgets' AND policyname = 'service'"
_EVER = datetime(1970, 1, 1, tzinfo=UTC)
_BUDGETS = sa.table("budgets", *map(sa.column, ("id", "org_id", "scope", "scope_id", "period", "limit_nusd", "hard")))
_PERIODS = sa.table(
    "budget_periods",
    sa.column("budget_id"),
    sa.column("start", Utc()),
    sa.column("spent_nusd", sa.BigInteger()),
    sa.column("held_nusd", sa.BigInteger()),
)
_ALERTS = sa.table("budget_alerts", sa.column("budget_id"))
_EVENTS = sa.table(
    "usage_events",
    *map(sa.column, ("org_id", "key_id", "amount_nusd")),
    sa.column("accepted_at", Utc()),
    sa.column("recorded_at", Utc()),
)
_OPERATIONS = sa.table(
    "operations", *map(sa.column, ("org_id", "key_id", "state", "hold_nusd")), sa.column("accepted_at", Utc())
)


def upgrade() -> None:
    connection = op.get_bind()
    shielded = connection.dialect.name == "postgresql" and connection.scalar(sa.text(_SHIELDED)) is not None
    if shielded:  # the tables' own owner sees no row of theirs
        connection.execute(sa.text(f"SET LOCAL ROLE {SERVICE_ROLE}"))
    _rename(connection)
    if shielded:
        connection.execute(sa.text("RESET ROLE"))


def _rename(connection: sa.Connection) -> None:
    of_keys = connection.execute(sa.select(_BUDGETS).where(_BUDGETS.c.scope == "key")).mappings()
    found = sorted(map(dict, of_keys), key=_misnamed)
    right: dict[tuple[str, str, str], Budget] = {}
    for row in found:
        other = right.setdefault((row["org_id"], _number(row), row["period"]), row)
        if other is not row:
            if (not row["hard"], row["limit_nusd"]) < (not other["hard"], other["limit_nusd"]):
                _change(connection, other, limit_nusd=row["limit_nusd"], hard=row["hard"])  # the stricter was meant
            _remove(connection, row, _ALERTS, _PERIODS)
            connection.execute(sa.delete(_BUDGETS).where(_BUDGETS.c.id == row["id"]))
        elif _misnamed(row):
            _change(connection, row, scope_id=_number(row))
            _count(connection, row)


def downgrade() -> None:
    pass


def _number(row: Budget) -> str:
    return str(int(row["scope_id"]))


def _misnamed(row: Budget) -> bool:
    return _number(row) != str(row["scope_id"])


def _change(connection: sa.Connection, row: Budget, **values: Any) -> None:
    row.update(values)
    connection.execute(sa.update(_BUDGETS).where(_BUDGETS.c.id == row["id"]).values(**values))


def _remove(connection: sa.Connection, row: Budget, *tables: Any) -> None:
    for table in tables:
        connection.execute(sa.delete(table).where(table.c.budget_id == row["id"]))


def _count(connection: sa.Connection, row: Budget) -> None:
    """What its key has spent and holds in each of its periods (`billing.money.budgets.derived`)."""
    key, events, work = int(row["scope_id"]), _EVENTS.c, _OPERATIONS.c
    spent, held = Counter[datetime](), Counter[datetime]()
    at = sa.func.coalesce(events.accepted_at, events.recorded_at, type_=Utc())
    of_key = sa.select(at, events.amount_nusd).where(events.org_id == row["org_id"], events.key_id == key)
    for when, amount in connection.execute(of_key):
        spent[_start(row, when)] += amount
    queued = (work.org_id == row["org_id"], work.key_id == key, work.state == "queued", work.hold_nusd > 0)
    for when, amount in connection.execute(sa.select(work.accepted_at, work.hold_nusd).where(*queued)):
        held[_start(row, when)] += amount
    _remove(connection, row, _PERIODS)
    for start in spent.keys() | held.keys():
        counts = {"budget_id": row["id"], "start": start, "spent_nusd": spent[start], "held_nusd": held[start]}
        connection.execute(sa.insert(_PERIODS).values(counts))


def _start(row: Budget, at: datetime) -> datetime:
    return _EVER if row["period"] == "total" else datetime(at.year, at.month, 1, tzinfo=UTC)
