"""Every way in which the books could disagree is found, to the nano-dollar."""

from __future__ import annotations

import pytest
from sqlalchemy import text, update

from billing.money import ledger
from billing.money.accounts import Payer
from billing.money.budgets import set_budget
from billing.reports.reconcile import Drift, check, drift_nusd
from store.tables import UsageHour
from tests.billing.conftest import Till


@pytest.fixture
def busy(till: Till) -> Till:
    till.database.write_now(
        lambda session: ledger.post(session, org_id="a", type="topup", amount_nusd=99, ref_type="t", ref_id="t")
    )
    till.database.write_now(lambda session: set_budget(session, "a", "key", "1", "month", 1000))
    for used in (5, 7):
        till.end(till.accept(10, Payer("a", None, 1)), train=used)
    till.accept(3, Payer("a", None, 1))
    assert check(till.database) == []
    return till


EVENT = (
    "INSERT INTO usage_events (org_id, session_id, run_id, operation_id, kind, base_model, quantity, price_version, "
    "rate_uusd, per_units, amount_nusd, recorded_at, accepted_at, settlement, key_id) "
    "SELECT org_id, session_id, run_id, 'planted', kind, base_model, 1, price_version, rate_uusd, per_units, 1, "
    "recorded_at, accepted_at, settlement, key_id FROM usage_events LIMIT 1"
)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        ("UPDATE wallets SET balance_nusd = balance_nusd + 1", {"balance against ledger"}),
        ("UPDATE wallets SET held_nusd = held_nusd + 1", {"held against queued operations"}),
        (
            "UPDATE operations SET hold_nusd = hold_nusd - 1 WHERE state = 'queued'",
            {"held against queued operations", "held of the budget"},
        ),
        ("UPDATE usage_hourly SET amount_nusd = amount_nusd + 1", {"hours of train m - 1 - s r nano 1000 nUSD"}),
        ("UPDATE usage_hourly SET quantity = quantity + 1", {"hours of train m - 1 - s r nano 1000 quantity"}),
        ("UPDATE usage_hourly SET events = events + 1", {"hours of train m - 1 - s r nano 1000 events"}),
        ("UPDATE budget_periods SET spent_nusd = spent_nusd + 1", {"spent of the budget"}),
        (EVENT, {"usage entry", "hours of train m - 1 - s r nano 1000", "spent of the budget"}),
        (
            "INSERT INTO ledger_entries (org_id, type, amount_nusd, ref_type, ref_id, memo, at) SELECT org_id, "
            "'usage', -1, 'settlement', 'planted', '', at FROM ledger_entries LIMIT 1",
            {"balance against ledger", "usage entry planted"},
        ),
    ],
)
def test_a_planted_nano_dollar_is_found(busy: Till, plant: str, found: set[str]) -> None:
    busy.database.write_now(lambda session: session.execute(text(plant)))
    drifts = check(busy.database)
    assert {next((name for name in found if name in drift.what), drift.what) for drift in drifts} == found
    assert all(abs(drift.kept - drift.derived) == 1 for drift in drifts)
    assert drift_nusd(drifts) == len(drifts)
    assert check(busy.database, "a") == drifts
    assert check(busy.database, "b") == []
    assert "a: " in str(drifts[0])


def test_a_wallet_that_is_gone_is_found(busy: Till) -> None:
    busy.database.write_now(lambda session: session.execute(text("DELETE FROM wallets")))
    assert check(busy.database) == [
        Drift("a", "balance against ledger", 0, 99 - 5 - 7),
        Drift("a", "held against queued operations", 0, 3),
    ]


@pytest.mark.parametrize("column", ["base_model", "project_id", "key_id", "user_id", "session_id", "run_id"])
def test_usage_in_the_hours_of_another_is_found(busy: Till, column: str) -> None:
    """The total is right, but not what reports say of a key, a user or a project."""
    moved = update(UsageHour).values({column: 2 if column == "key_id" else "2"})
    busy.database.write_now(lambda session: session.execute(moved))
    amounts = [(drift.kept, drift.derived) for drift in check(busy.database) if drift.what.endswith("nUSD")]
    assert sorted(amounts) == [(0, 12), (12, 0)]
