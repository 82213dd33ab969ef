"""What an organisation can spend. A wallet is made at its first use, with the mode and overdraft of `set_default`."""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

from sqlalchemy import select
from sqlalchemy.orm import Session

from store.database.bulk import insert_into, take_locks
from store.settings import BillingSettings
from store.tables import Wallet, WalletDefault

NUSD_PER_USD = 10**9
Mode = Literal["prepaid", "postpaid", "unlimited"]
MODES: tuple[Mode, ...] = get_args(Mode)


def wallet_of(session: Session, org_id: str) -> Wallet:
    """The wallet of an organisation, locked until the transaction ends. Call it in a write, before any other row about
    the organisation's money is read."""
    take_locks(session, [org_id])
    query = select(Wallet).where(Wallet.org_id == org_id).execution_options(populate_existing=True)
    wallet = session.scalars(query).one_or_none()
    if wallet is None:
        make_wallets(session, [org_id])
        wallet = session.scalars(query).one()
    return wallet


def shown_wallet(session: Session, org_id: str) -> Wallet:
    """The wallet of an organisation, for reading; if there is none yet, as it would be made."""
    wallet = session.get(Wallet, org_id)
    if wallet is not None:
        return wallet
    default = _default(session)
    return Wallet(org_id=org_id, mode=default.mode, balance_nusd=0, held_nusd=0, overdraft_nusd=default.overdraft_nusd)


def _default(session: Session) -> WalletDefault:
    return session.get(WalletDefault, 1) or WalletDefault(mode="unlimited", overdraft_nusd=0)


def make_wallets(session: Session, org_ids: list[str]) -> None:
    """Wallets for organisations that have none."""
    default = _default(session)
    rows = [{"org_id": org_id, "mode": default.mode, "overdraft_nusd": default.overdraft_nusd} for org_id in org_ids]
    session.execute(insert_into(session, Wallet).on_conflict_do_nothing(), rows)


def set_default(session: Session, billing: BillingSettings) -> None:
    """Set the mode and overdraft of wallets made from now on. Several servers may do it at once."""
    values = {"mode": billing.mode, "overdraft_nusd": billing.overdraft_usd * NUSD_PER_USD}
    insert = insert_into(session, WalletDefault).values(id=1, **values)
    session.execute(insert.on_conflict_do_update(index_elements=["id"], set_=values))


def set_mode(session: Session, org_id: str, mode: Mode, overdraft_nusd: int) -> Wallet:
    """Change how an organisation pays. Holds and balance stay as they are."""
    wallet = wallet_of(session, org_id)
    wallet.mode, wallet.overdraft_nusd = mode, overdraft_nusd
    session.flush()
    return wallet


class _Spendable(Protocol):
    mode: Any
    balance_nusd: Any
    held_nusd: Any
    overdraft_nusd: Any


def available_nusd(wallet: _Spendable) -> int | None:
    """The amount that may still be held; None without a limit."""
    if wallet.mode == "unlimited":
        return None
    return int(wallet.balance_nusd + wallet.overdraft_nusd - wallet.held_nusd)
