"""The end of operations and their money, as the journal settles them, on both databases: a hold is released once, and
only work that succeeded costs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import pytest

from billing.money import ledger
from billing.money.wallets import set_mode
from billing.prices import KINDS, load_prices
from billing.reports.reconcile import check
from scheduler.journal.accepting.acceptance import Taking, insert_all
from scheduler.journal.ending import settlement
from scheduler.journal.ending.settlement import Ending, Settled, Settlement, result_of
from scheduler.links.messages import Done, Failure
from scheduler.order.operations import Operation
from scheduler.order.plans import BODY_ONLY
from store import tables
from store.database.db import Database
from tests.rows import in_batch

NOW = datetime.now(UTC)
#: A token costs a nano-dollar.
PRICES = load_prices([{"version": "n", "effective_from": NOW.replace(year=2020), "storage_uusd_per_gb_month": 1,
                       "models": {"*": dict.fromkeys(KINDS, 1000)}}])  # fmt: skip
HOLD = 100


class Till:
    """An organisation with 1,000 nano-dollars, and operations that hold 100 each."""

    def __init__(self, database: Database) -> None:
        self.database = database
        database.write_now(self._open)

    @staticmethod
    def _open(session: Any) -> None:
        session.add(tables.Organisation(id="a", name="a", created_at=NOW))
        session.flush()
        set_mode(session, "a", "prepaid", 0)
        ledger.post(session, org_id="a", type="topup", amount_nusd=1000, ref_type="test", ref_id="1")

    def accept(self, name: str, seq: int) -> Operation:
        op = Operation(name, "a", "s", "run", seq, "forward_backward", "m", HOLD, "", BODY_ONLY, NOW)
        row = {
            "id": name, "org_id": "a", "session_id": "s", "key_id": None, "user_id": None, "project_id": None,
            "lane": "run", "seq": seq, "kind": op.kind, "base_model": "m", "state": "queued", "tokens": HOLD,
            "hold_nusd": HOLD, "body_ref": "", "body_sha256": "", "plan": {}, "accepted_at": NOW,
        }  # fmt: skip
        in_batch(self.database, insert_all, Taking(row), lock="a")
        return op

    def end(self, op: Operation, done: Done) -> Settled:
        ending = Ending(op, done, result_of(op, done), "run")
        found: Settled = in_batch(self.database, Settlement(PRICES).settle, ending, lock="a")
        return found

    def money(self) -> tuple[int, int]:
        """The balance, and the sum of holds."""
        with self.database.read() as session:
            wallet = session.get_one(tables.Wallet, "a")
            return wallet.balance_nusd, wallet.held_nusd

    def charged(self) -> list[tuple[str, int]]:
        with self.database.read() as session:
            return [(row.operation_id, row.amount_nusd) for row in session.query(tables.UsageEvent)]


@pytest.fixture
def till(any_database: Database) -> Till:
    return Till(any_database)


def failed(name: str, tokens: int = 0) -> Done:
    return Done(name, b"", {"tokens": tokens}, Failure("the disk is gone", "server"))


def test_a_failure_that_arrives_twice_releases_its_hold_once(till: Till) -> None:
    """Otherwise it would release another operation's hold."""
    op, _other = till.accept("one", 1), till.accept("two", 2)
    assert till.money() == (1000, 2 * HOLD)
    assert till.end(op, failed("one")) is not None
    assert till.money() == (1000, HOLD)
    assert till.end(op, failed("one")) is None
    assert till.money() == (1000, HOLD)
    assert check(till.database) == []


def test_a_result_that_arrives_twice_costs_once(till: Till) -> None:
    op, _other = till.accept("one", 1), till.accept("two", 2)
    for again in (False, True):
        assert (till.end(op, Done("one", b"result", {"tokens": 60})) is None) == again
        assert till.money() == (940, HOLD)
    assert till.charged() == [("one", 60)]
    assert check(till.database) == []


def test_what_ended_stays_as_it_ended(till: Till) -> None:
    """A result after a failure, and a failure after a result, change neither the outcome nor the wallet."""
    one, two = till.accept("one", 1), till.accept("two", 2)
    till.end(one, failed("one"))
    assert till.end(one, Done("one", b"late", {"tokens": 60})) is None
    till.end(two, Done("two", b"result", {"tokens": 50}))
    assert till.end(two, failed("two")) is None
    assert till.money() == (950, 0)
    with till.database.read() as session:
        states = {row.id: (row.state, row.error) for row in session.query(tables.Operation)}
    assert states == {"one": ("failed", "the disk is gone"), "two": ("done", None)}


def test_work_that_the_service_fails_costs_nothing(till: Till) -> None:
    """However much of it a worker has computed."""
    op = till.accept("one", 1)
    settled = till.end(op, failed("one", tokens=60))
    assert settled is not None
    assert settled[0].error == "the disk is gone"
    assert till.money() == (1000, 0)
    assert till.charged() == []


def test_an_operation_that_is_gone_costs_nothing(till: Till) -> None:
    stranger = Operation("gone", "a", "s", "run", 9, "forward_backward", "m", HOLD, "", BODY_ONLY, NOW)
    assert till.end(stranger, Done("gone", b"", {"tokens": 60})) is None
    assert (till.money(), till.charged()) == ((1000, 0), [])


def test_what_ends_is_written_by_the_databases_time(till: Till, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas' clocks differ: clients ask what has ended since, jobs how long ago, and months are closed."""

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(hours=1)

    if till.database.url.startswith("postgresql"):  # SQLite has the clock of its one machine
        monkeypatch.setattr(settlement, "datetime", Behind)
    began = datetime.now(UTC)
    till.end(till.accept("one", 1), Done("one", b"result", {"tokens": 60}))
    till.end(till.accept("two", 2), failed("two"))
    with till.database.read() as session:
        finished = [row.finished_at for row in session.query(tables.Operation) if row.finished_at is not None]
        recorded = [row.recorded_at for row in session.query(tables.UsageEvent)]
        hours = [row.hour for row in session.query(tables.UsageHour)]
    assert (len(finished), len(recorded)) == (2, 1)
    assert all(began <= at <= datetime.now(UTC) for at in finished + recorded)
    assert [hour.hour for hour in hours] == [at.hour for at in recorded]
