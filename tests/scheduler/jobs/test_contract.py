"""Every job, run twice, leaves what it leaves when run once: on both databases, in a world with work for each."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from billing.money import grants
from billing.money.budgets import Period, remove_budget, set_budget
from billing.payments import inbox
from scheduler.jobs import housekeeping
from scheduler.jobs.catalogue import JOBS
from scheduler.jobs.running import run_now
from store import tables
from store.database.db import Database
from store.tables import Base
from tests.billing.payments.kit import Payments
from tests.fakestripe import FakeStripe, fake_stripe
from tests.rows import run_row, session_row

START = datetime(2026, 11, 29, 12, tzinfo=UTC)
AFTER = datetime(2026, 12, 1, 3, tzinfo=UTC)

#: What each job changes in the world below when it first runs; the second time it must change nothing.
EXPECTED: dict[str, dict[str, int]] = {
    "ask_for_missed_events": {"kept": 1},
    "budget_alerts": {"raised": 1},
    "close_invoices": {"closed": 1},
    "compare_with_stripe": {"compared": 1, "differ": 1},
    "expire_checkpoints": {"expired": 1},
    "expire_credit": {"expired": 1},
    "forget_samples": {"deleted": 1},
    "heartbeat": {},
    "meter_storage": {"begun": 0, "events": 39},
    "process_webhooks": {"processed": 1},
    "put_meter_events": {"put": 1},
    "reconcile": {"differ": 1, "drift_nusd": 5},
    "send_meter_events": {"sent": 1},
    "sweep_files": {"deleted": 1},
    "sweep_results": {"deleted": 1},
}


@pytest.fixture(scope="module")
def stripe_server() -> Iterator[FakeStripe]:
    with fake_stripe() as server:
        yield server


@pytest.fixture
def world(any_database: Database, stripe_server: FakeStripe, tmp_path: Path) -> Payments:
    return Payments(any_database, stripe_server.reset(START), tmp_path)


def _checkpoint(world: Payments, org_id: str, expires_at: datetime | None) -> None:
    """A checkpoint of a run in a session."""
    now = world.now

    def write(session: Any) -> None:
        session.add(session_row(org_id, now))
        session.flush()
        session.add(run_row(org_id, now))
        session.flush()
        session.add(
            tables.Checkpoint(
                id="c",
                org_id=org_id,
                run_id="s:train:0",
                kind="weights",
                name="one",
                ref="weights/c",
                size_bytes=10**9,
                public=False,
                user_metadata={},
                created_at=now,
                expires_at=expires_at,
            )
        )

    world.database.write_now(write)


def _result(world: Payments, org_id: str, finished_at: datetime, *, kept: bool = True) -> None:
    """A sample whose result is kept, or no longer."""
    operation = tables.Operation(
        id="op",
        org_id=org_id,
        session_id="s",
        lane="s:sample:0",
        seq=0,
        kind="sample",
        base_model="m",
        state="done",
        tokens=0,
        body_ref="",
        body_sha256="",
        plan={},
        result_ref="results/op/op",
        result_bytes=1 if kept else None,
        accepted_at=finished_at,
        finished_at=finished_at,
    )
    world.context.blobs.put("results/op/op", b"x")
    world.database.write_now(lambda session: session.add(operation))


def _prepare(world: Payments, job: str) -> None:
    """Give one job something to do."""
    org_id = world.organisation()
    jobs = world.context
    if job in ("put_meter_events", "send_meter_events", "close_invoices", "compare_with_stripe"):
        world.use(org_id, "train", 5_000)
    if job in ("send_meter_events", "close_invoices", "compare_with_stripe"):
        run_now(jobs, JOBS["put_meter_events"])
    if job in ("close_invoices", "compare_with_stripe"):
        run_now(jobs, JOBS["send_meter_events"])
    if job == "compare_with_stripe":
        world.fake.stripe.counted.clear()  # Stripe has lost it
    if job == "expire_checkpoints":
        _checkpoint(world, org_id, START + timedelta(hours=5))
    if job == "meter_storage":
        _checkpoint(world, org_id, None)
        assert (run_now(jobs, JOBS[job]) or {})["begun"] == 1  # 39 full hours before AFTER
    if job == "expire_credit":
        end = START + timedelta(hours=1)
        world.database.write_now(
            lambda session: grants.give(
                session, org_id=org_id, amount_nusd=10**9, kind="promo", expires_at=end, now=START
            )
        )
    if job == "reconcile":
        world.database.write_now(lambda session: setattr(session.get_one(tables.Wallet, org_id), "balance_nusd", 5))
    if job == "budget_alerts":
        budget = world.database.write_now(
            lambda session: set_budget(session, org_id, "org", org_id, "month", 10**9, hard=False, alert_pcts=[50])
        )
        assert budget is not None
        world.use(org_id, "train", 600_000_000)
    if job in ("process_webhooks", "ask_for_missed_events"):
        payment = world.fake.stripe.add(
            "pi",
            "payment_intent",
            amount=100,
            amount_received=100,
            currency="usd",
            customer=world.customer(org_id),
            metadata={"weft_kind": "topup", "weft_org": org_id},
            status="succeeded",
            last_payment_error=None,
        )
        event = world.fake.stripe.tell("payment_intent.succeeded", payment)
        if job == "process_webhooks":
            world.database.write_now(lambda session: inbox.keep(session, event, START))
    if job == "sweep_results":
        _result(world, org_id, finished_at=START - timedelta(hours=25))
    if job == "forget_samples":
        _result(world, org_id, finished_at=START - timedelta(days=91), kept=False)
    if job == "sweep_files":
        unneeded = world.folder / "blobs" / "weights" / "nobody"
        unneeded.mkdir(parents=True)
        run_now(jobs, JOBS[job])  # the first round only notices it
    if job in ("close_invoices", "compare_with_stripe", "meter_storage", "expire_credit", "expire_checkpoints"):
        world.fake.stripe.now = AFTER.timestamp()


def _rows(world: Payments) -> dict[str, list[Any]]:
    """All rows of the database, without the times when jobs ran."""
    with world.database.read() as session:
        return {
            table.name: sorted(map(repr, session.execute(select(table)).all()))
            for table in Base.metadata.sorted_tables
            if table.name not in ("job_runs", "job_leases")
        }


def test_every_job_is_here() -> None:
    assert set(EXPECTED) == set(JOBS)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_twice_is_once(world: Payments, name: str) -> None:
    _prepare(world, name)
    before = _rows(world)
    first = run_now(world.context, JOBS[name]) or {}
    assert {key: first.get(key) for key in EXPECTED[name]} == EXPECTED[name]
    once, counted = _rows(world), list(world.fake.stripe.counted)
    if name not in ("heartbeat", "sweep_files"):
        assert once != before
    world.wait(1)
    run_now(world.context, JOBS[name])
    assert _rows(world) == once
    assert world.fake.stripe.counted == counted


def test_the_alert_of_a_budget_says_amounts_below_a_cent(world: Payments) -> None:
    org_id = world.organisation()
    small = {"period": "month", "limit_nusd": 200_000, "hard": False, "alert_pcts": [50]}
    world.database.write_now(lambda session: set_budget(session, org_id, "org", org_id, **small))
    world.use(org_id, "train", 108_000)
    run_now(world.context, JOBS["budget_alerts"])
    with world.database.read() as session:
        alert = session.scalars(select(tables.Alert).filter_by(kind="budget")).one()
    assert alert.message == "50 % of a budget is spent: $0.000108000 of $0.000200000"


@pytest.mark.parametrize("period", ["month", "total"])
def test_the_alert_of_a_budget_is_over_with_it_or_with_its_month(world: Payments, period: Period) -> None:
    org_id, job = world.organisation(), JOBS["budget_alerts"]
    budget = world.database.write_now(
        lambda session: set_budget(session, org_id, "org", org_id, period, 100, hard=False, alert_pcts=[50], now=START)
    )
    world.use(org_id, "train", 60)
    assert run_now(world.context, job) == {"raised": 1, "over": 0}
    assert run_now(world.context, job) == {"raised": 0, "over": 0}
    world.fake.stripe.now = AFTER.timestamp()
    assert run_now(world.context, job) == {"raised": 0, "over": int(period == "month")}
    world.database.write_now(lambda session: remove_budget(session, org_id, budget.id))
    run_now(world.context, job)
    with world.database.read() as session:
        assert session.scalars(select(tables.Alert).filter_by(kind="budget")).one().resolved_at is not None


def test_what_a_budget_reached_as_its_month_ended_is_told_in_the_next(world: Payments) -> None:
    org_id, job = world.organisation(), JOBS["budget_alerts"]
    world.database.write_now(
        lambda session: set_budget(session, org_id, "org", org_id, "month", 100, hard=False, alert_pcts=[50], now=START)
    )
    world.use(org_id, "train", 60)
    world.fake.stripe.now = AFTER.timestamp()
    assert run_now(world.context, job) == {"raised": 1, "over": 0}
    assert run_now(world.context, job) == {"raised": 0, "over": 1}
    assert run_now(world.context, job) == {"raised": 0, "over": 0}


def test_a_fresh_process_forgets_nothing_that_matters(world: Payments) -> None:
    """The reaper remembers things between two rounds; one that has forgotten them only takes a round longer."""
    _prepare(world, "sweep_files")
    housekeeping._REAPERS.clear()
    assert run_now(world.context, JOBS["sweep_files"]) == {"deleted": 0}
    assert run_now(world.context, JOBS["sweep_files"]) == {"deleted": 1}


def test_without_payments_nothing_is_asked_of_stripe(world: Payments) -> None:
    world.use(world.organisation(), "train", 5_000)
    world.settings = world.fake.settings().model_copy(update={"enabled": False})
    asked = len(world.fake.front.requests)
    for job in JOBS.values():
        run_now(world.context, job)
    assert len(world.fake.front.requests) == asked
    assert world.outbox() == []
