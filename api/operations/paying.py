"""Limits on money, and quotas, for what is no operation of a run: it is done at once, and costs nothing but what it
keeps stored."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy.orm import Session

from api.errors import OverQuota, PaymentRequired
from api.who.principal import Principal
from billing.metering.quotas import QuotaReached, check, claim
from billing.money.accounts import OutOfMoney, Payer, check_left
from store import tables
from store.settings import Limits


def need_money(session: Session, who: Principal, owner: tables.Session) -> None:
    """In a write with the lock of the organisation: raise PaymentRequired once the wallet or a hard budget of the payer
    is used up. `owner` is the session that it counts for."""
    try:
        check_left(session, Payer(who.org_id, owner.project_id, who.key_id), datetime.now(UTC))
    except OutOfMoney as error:
        raise PaymentRequired(error) from None


def need_room(session: Session, org_id: str, limits: Limits, quota: str, adds: int = 1, coming: int = 0) -> None:
    """Raise OverQuota unless the organisation may have that much more, beside what is `coming` and not in the database.
    In a write with its lock."""
    try:
        check(session, org_id, claim(limits, quota, adds), coming)
    except QuotaReached as error:
        raise OverQuota(error) from None
