"""How new wallets pay, and what they leave to spend; servers that start at the same moment all store the defaults."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from sqlalchemy.orm import Session

from billing.money.wallets import Mode, available_nusd, make_wallets, set_default, set_mode, wallet_of
from store.database.db import Database
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


def test_a_wallet_is_made_once_and_of_those_that_have_none(database: Database) -> None:
    """Each organisation gets a wallet of its own; without defaults it may spend without limit, and has no overdraft."""
    database.write_now(add_organisations)
    database.write_now(lambda session: set_mode(session, "b", "prepaid", 7))

    def read(session: Session) -> list[tuple[str, str, int, int, int]]:
        make_wallets(session, ["a", "b"])
        make_wallets(session, ["a", "b"])
        rows = session.query(Wallet).order_by(Wallet.org_id)
        return [(row.org_id, row.mode, row.overdraft_nusd, row.balance_nusd, row.held_nusd) for row in rows]

    assert database.write_now(read) == [("a", "unlimited", 0, 0, 0), ("b", "prepaid", 7, 0, 0)]


@pytest.mark.parametrize("org_id", ["a", "b"])
def test_a_wallet_is_its_organisations_own(database: Database, org_id: str) -> None:
    """No matter which others sort before or after it; and a change of how it pays does not touch its money."""
    database.write_now(add_organisations)
    database.write_now(lambda session: make_wallets(session, ["a", "b"]))

    def write(session: Session) -> None:
        wallet = wallet_of(session, org_id)
        wallet.balance_nusd, wallet.held_nusd = 5, 3
        assert set_mode(session, org_id, "postpaid", 9).org_id == org_id

    database.write_now(write)
    with database.read() as session:
        rows = {row.org_id: row for row in session.query(Wallet)}
        values = {name: (row.mode, row.overdraft_nusd, row.balance_nusd, row.held_nusd) for name, row in rows.items()}
    other = "b" if org_id == "a" else "a"
    assert values == {org_id: ("postpaid", 9, 5, 3), other: ("unlimited", 0, 0, 0)}


def test_a_wallet_is_read_anew_after_its_lock(database: Database) -> None:
    """The row that the session read before may be old: another may have written it while this one waited."""
    database.write_now(add_organisations)
    database.write_now(lambda session: make_wallets(session, ["a"]))

    def write(session: Session) -> int:
        stale = session.get_one(Wallet, "a")
        session.connection().exec_driver_sql("UPDATE wallets SET balance_nusd = 8 WHERE org_id = 'a'")
        assert stale.balance_nusd == 0
        return wallet_of(session, "a").balance_nusd

    assert database.write_now(write) == 8


def test_the_last_defaults_hold(database: Database) -> None:
    database.write_now(add_organisations)
    for usd in (1, 2):
        database.write_now(
            lambda session, usd=usd: set_default(session, BillingSettings(mode="prepaid", overdraft_usd=usd))  # type: ignore[misc]
        )
    assert database.write_now(lambda session: wallet_of(session, "b").overdraft_nusd) == 2_000_000_000
    with database.read() as session:
        assert [row.id for row in session.query(WalletDefault)] == [1]


@pytest.mark.parametrize(("mode", "available"), [("prepaid", 100 + 30 - 7), ("postpaid", 123), ("unlimited", None)])
def test_what_is_left(mode: Mode, available: int | None) -> None:
    wallet = Wallet(org_id="a", mode=mode, balance_nusd=100, overdraft_nusd=30, held_nusd=7)
    assert available_nusd(wallet) == available
