"""Credit grants, which may expire. They are spent before other money (`billing.money.accounts`)."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.money import ledger
from billing.money.accounts import Accounts, Payer, burning_order
from store.database.bulk import take_locks
from store.database.db import Database
from store.tables import CreditGrant, LedgerEntry

GrantKind = Literal["promo", "paid"]


def give(
    session: Session,
    org_id: str,
    amount_nusd: int,
    *,
    kind: GrantKind = "promo",
    expires_at: datetime | None = None,
    memo: str = "",
    now: datetime | None = None,
) -> CreditGrant:
    """Credit an organisation. Must be called in a write."""
    if amount_nusd <= 0:
        raise ValueError(f"a grant must be more than 0, got {amount_nusd} nUSD")
    now = now or datetime.now(UTC)
    grant = CreditGrant(
        id=uuid.uuid4().hex,
        org_id=org_id,
        kind=kind,
        amount_nusd=amount_nusd,
        remaining_nusd=amount_nusd,
        created_at=now,
        expires_at=expires_at,
    )
    ledger.post(
        session,
        org_id=org_id,
        type="grant",
        amount_nusd=amount_nusd,
        ref_type="grant",
        ref_id=grant.id,
        memo=memo,
        at=now,
    )
    session.add(grant)
    session.flush()
    return grant


def take(session: Session, org_id: str, amount_nusd: int, memo: str) -> LedgerEntry:
    """Take money out of a balance, which may become negative: money that was returned elsewhere, or given by mistake.
    Grants are used up by it in the order of spending; otherwise their expiry would take it once more. Call it in a
    write."""
    if amount_nusd <= 0:
        raise ValueError(f"the amount to take must be more than 0, got {amount_nusd} nUSD")
    entry = ledger.post(
        session,
        org_id=org_id,
        type="adjustment",
        amount_nusd=-amount_nusd,
        ref_type="operator",
        ref_id=uuid.uuid4().hex,
        memo=memo,
    )
    assert entry is not None  # the reference is new, so it was posted
    left = session.scalars(select(CreditGrant).filter_by(org_id=org_id).where(CreditGrant.remaining_nusd > 0))
    for found in sorted(left, key=burning_order):
        part = min(amount_nusd, found.remaining_nusd)
        found.remaining_nusd -= part
        amount_nusd -= part
    return entry


def expire(database: Database, now: datetime | None = None) -> dict[str, int]:
    """Take back expired grants of all organisations. For the jobs; when money is held, `hold` does it at once."""
    now = now or datetime.now(UTC)

    def work(session: Session) -> int:
        over = select(CreditGrant.org_id).where(CreditGrant.expires_at <= now, CreditGrant.remaining_nusd > 0)
        org_ids = sorted(set(session.scalars(over)))
        take_locks(session, org_ids)
        accounts = Accounts(session, {Payer(org_id) for org_id in org_ids}, set(), now)
        expired = accounts.expire_grants()
        accounts.store()
        return expired

    return {"expired": database.write_now(work)}
