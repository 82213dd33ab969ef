"""Servers that start at the same moment all store the defaults of new wallets."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy.orm import Session

from billing.wallets import set_default
from store.db import Database
from store.settings import BillingSettings
from store.tables import WalletDefault

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
