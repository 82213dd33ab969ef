"""What new wallets are, and what they leave to spend; servers that start at the same moment all store the defaults."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from sqlalchemy.orm import Session

from billing.wallets import Mode, available_nusd, set_default, set_mode, wallet_of
from store.db import Database
from store.settings import BillingSettings
from store.tables import Wallet, WalletDefault
from tests.billing.conftest import add_organisations

BILLING = BillingSettings()


def test_two_servers_store_the_defaults_at_once(postgres_database: Database) -> None:
    other = Database(postgres_database.url)
    stored, may_commit = threading.Event(), threading.Event()

    def first(session: Session) -> None:
        set_default(session, BILLING)
        stored.set()
        may_commit.wait(30)

    errors: list[BaseException] = []

    def write(database: Database, work: Callable[[Session], None]) -> None:
        try:
            database.write_now(work)
        except BaseException as error:
            errors.append(error)

    one = threading.Thread(target=write, args=(postgres_database, first))
    two = threading.Thread(target=write, args=(other, lambda session: set_default(session, BILLING)))
    one.start()
    assert stored.wait(30)
    two.start()
    two.join(0.5)
    may_commit.set()
    one.join()
    two.join()
    other.close()
    assert errors == []
    with postgres_database.read() as session:
        assert session.get(WalletDefault, 1) is not None


def test_wallets_begin_as_the_settings_say_and_are_their_own(any_database: Database) -> None:
    any_database.write_now(add_organisations)
    assert any_database.write_now(lambda session: wallet_of(session, "a").mode) == "unlimited"
    billing = BillingSettings(mode="postpaid", overdraft_usd=3)
    any_database.write_now(lambda session: set_default(session, billing))
    any_database.write_now(lambda session: set_mode(session, "a", "prepaid", 7))

    def read(session: Session) -> list[tuple[str, str, int]]:
        wallets = [wallet_of(session, org_id) for org_id in ("a", "b")]
        return [(wallet.org_id, wallet.mode, wallet.overdraft_nusd) for wallet in wallets]

    assert any_database.write_now(read) == [("a", "prepaid", 7), ("b", "postpaid", 3 * 10**9)]


@pytest.mark.parametrize(("mode", "available"), [("prepaid", 100 + 30 - 7), ("postpaid", 123), ("unlimited", None)])
def test_what_is_left(mode: Mode, available: int | None) -> None:
    wallet = Wallet(org_id="a", mode=mode, balance_nusd=100, overdraft_nusd=30, held_nusd=7)
    assert available_nusd(wallet) == available
