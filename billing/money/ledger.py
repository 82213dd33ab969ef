"""Movements of a wallet's balance: rows that are only ever added, each once, with the balance in the same transaction.

A mistake is corrected by another row. `billing.metering.charges` posts what work costs; top-ups, refunds and the like
come from `billing.money.grants`, `billing.payments` and the operator's command.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, get_args

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.money.wallets import wallet_of
from store.database.bulk import insert_into
from store.tables import LedgerEntry, UsageEvent
from store.tables.base import any_index_but

EntryType = Literal["topup", "grant", "usage", "refund", "adjustment", "expiry", "invoice", "chargeback"]
TYPES: tuple[EntryType, ...] = get_args(EntryType)


def post(
    session: Session,
    *,
    org_id: str,
    type: EntryType,
    amount_nusd: int,
    ref_type: str,
    ref_id: str,
    memo: str = "",
    at: datetime | None = None,
) -> LedgerEntry | None:
    """Move a wallet's balance by `amount_nusd` (negative takes money away), once for each (org, type, ref).

    Call it in a write. None if that reference was posted before; then nothing changes."""
    if amount_nusd == 0:
        raise ValueError(f"ledger entry {type} {ref_type} {ref_id}: the amount is 0; an entry moves the balance")
    wallet = wallet_of(session, org_id)
    row = insert_into(session, LedgerEntry).values(
        org_id=org_id,
        type=type,
        amount_nusd=amount_nusd,
        ref_type=ref_type,
        ref_id=ref_id,
        memo=memo[:256],
        at=at or datetime.now(UTC),
    )
    entry = session.scalars(row.on_conflict_do_nothing().returning(LedgerEntry)).one_or_none()
    if entry is None:
        return None
    wallet.balance_nusd += amount_nusd
    session.flush()
    return entry


def refund_operation(session: Session, org_id: str, operation_id: str, memo: str = "") -> LedgerEntry | None:
    """Give back all that an operation of this organisation has cost, once. Call it in a write.

    Returns None if it was refunded before, or cost nothing. Metered usage and budgets stay as they are.
    """
    of_org = any_index_but(UsageEvent.org_id) == org_id
    query = select(UsageEvent.amount_nusd).where(of_org, UsageEvent.operation_id == operation_id)
    amount = sum(session.scalars(query))
    if amount == 0:
        return None
    return post(
        session, org_id=org_id, type="refund", amount_nusd=amount, ref_type="operation", ref_id=operation_id, memo=memo
    )
