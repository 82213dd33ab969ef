"""Limits on money, and quotas, for actions that are no operations: they take effect at once, and cost only storage."""

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
    """Within a write that has the organisation's lock: raise PaymentRequired if the wallet or a hard budget of the
    payer is used up. `owner` is the session that it counts for."""
    try:
        check_left(session, Payer(who.org_id, owner.project_id, who.key_id), datetime.now(UTC))
    except OutOfMoney as error:
        raise PaymentRequired(error) from None


def need_room(session: Session, org_id: str, limits: Limits, quota: str, adds: int = 1, coming: int = 0) -> None:
    """Within a write that has the organisation's lock: raise OverQuota unless it may have that much more, beside what
    is `coming` and not yet in the database."""
    try:
        check(session, org_id, claim(limits, quota, adds), coming)
    except QuotaReached as error:
        raise OverQuota(error) from None
