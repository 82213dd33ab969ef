"""Which tables hold what belongs to an organisation, and what becomes of it when the organisation's data is deleted.

Every table with an `org_id` is in DELETED or in KEPT; a test holds it. What is kept is money's records and the audit
trail, which the law wants for years (docs/tenancy.md), without names of people where they are not the record itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Select, Table, select

from store import tables
from store.tables import Base

#: In an order in which foreign keys allow their deletion.
DELETED: tuple[type[Base], ...] = (
    tables.RunMetric,
    tables.RunCurve,
    tables.Checkpoint,
    tables.Sampler,
    tables.SessionTurn,
    tables.Run,
    tables.Operation,
    tables.Session,
    tables.BrowserSession,
    tables.LoginLink,
    tables.Invitation,
    tables.Membership,
)
KEPT: tuple[type[Base], ...] = (
    tables.Alert,
    tables.ApiKey,  # revoked, without a name; usage and audit refer to its number
    tables.AuditEntry,
    tables.Budget,
    tables.BudgetAlert,
    tables.CreditGrant,
    tables.Invoice,
    tables.LedgerEntry,
    tables.Project,  # usage refers to its id
    tables.StorageSpan,  # until it is billed
    tables.StripeMeterCursor,
    tables.StripeOutbox,
    tables.UsageEvent,
    tables.UsageHour,
    tables.Wallet,
)
#: Columns that are never shown to anybody.
SECRETS = {"secret_sha256", "previous_sha256", "sid_sha256", "token_sha256"}


def rows_of(org_id: str) -> Iterator[tuple[str, Select[Any]]]:
    """(table, the query for all its rows that belong to the organisation), without secrets."""
    for table in Base.metadata.sorted_tables:
        if "org_id" in table.c:
            yield table.name, _shown(table).where(table.c.org_id == org_id)
    organisation, member, user = tables.Organisation.__table__, tables.Membership, tables.User.__table__
    yield "organisations", select(organisation).where(organisation.c.id == org_id)
    yield "users", select(user).join(member, member.user_id == user.c.id).where(member.org_id == org_id)
    identity = tables.Identity.__table__
    yield (
        "identities",
        select(identity).join(member, member.user_id == identity.c.user_id).where(member.org_id == org_id),
    )
    budget, period = tables.Budget, tables.BudgetPeriod.__table__
    yield "budget_periods", select(period).join(budget, budget.id == period.c.budget_id).where(budget.org_id == org_id)


def _shown(table: Table) -> Select[Any]:
    return select(*(column for column in table.c if column.name not in SECRETS))
