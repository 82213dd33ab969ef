"""Money given back for work that was charged: new rows; what was metered stays as it is."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing import ledger
from store.tables import LedgerEntry, UsageEvent


def refund_operation(session: Session, org_id: str, operation_id: str, memo: str = "") -> LedgerEntry | None:
    """Give back all that an operation of this organisation has cost, once. To be called in a write.

    None when it was refunded before, or has cost nothing. Budgets count what was spent and do not get it back."""
    query = select(UsageEvent.amount_nusd).where(UsageEvent.org_id == org_id, UsageEvent.operation_id == operation_id)
    amount = sum(session.scalars(query))
    if amount == 0:
        return None
    return ledger.post(
        session, org_id=org_id, type="refund", amount_nusd=amount, ref_type="operation", ref_id=operation_id, memo=memo
    )
