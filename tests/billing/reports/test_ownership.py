"""Costs over a span of time: who used the machines, what that cost, and what was paid."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.reports.ownership import covered_s, ownership
from billing.reports.tco import GpuHour
from store.database.db import Database
from store.tables import Operation, Organisation, UsageHour

SINCE = datetime(2026, 11, 1, tzinfo=UTC)
UNTIL = SINCE + timedelta(hours=10)
HOUR = GpuHour(1.5, 0.5)


def operation(org: str, kind: str, at_s: float, seconds: float, tokens: int, of: int, name: str) -> Operation:
    start = SINCE + timedelta(seconds=at_s)
    timings = {"stretches": [[1, 0, int(seconds * 1e6), 1, 1, of]], "computed": 0, "settled": 0}
    return Operation(
        id=name, org_id=org, session_id="s", lane=name, seq=0, kind=kind, base_model="m", state="done", tokens=tokens,
        body_ref="", body_sha256="", plan={}, accepted_at=start, finished_at=start + timedelta(seconds=seconds),
        timings=timings,
    )  # fmt: skip


def usage(org: str, kind: str, quantity: int, amount_nusd: int, hour: datetime = SINCE) -> UsageHour:
    names: dict[str, Any] = dict.fromkeys(("project_id", "user_id", "session_id", "run_id", "price_version"), "")
    return UsageHour(
        org_id=org, hour=hour, kind=kind, base_model="m", key_id=0, rate_uusd=1, per_units=10**6, quantity=quantity,
        amount_nusd=amount_nusd, events=1, **names,
    )  # fmt: skip


def fill(session: Session) -> None:
    for org in ("a", "b"):
        session.add(Organisation(id=org, name=org, created_at=SINCE))
    session.flush()
    # One pass of 1000 s, three quarters of it a's; one sample of b alone for 3000 s; an operation from before the time.
    session.add(operation("a", "forward_backward", 0, 1000, 300, 400, "1"))
    session.add(operation("b", "forward_backward", 0, 1000, 100, 400, "2"))
    session.add(operation("b", "sample", 500, 3000, 900, 900, "3"))
    session.add(operation("b", "sample", -9000, 3000, 900, 900, "4"))
    session.add(usage("a", "train", 2_000_000, 6_000_000_000))
    session.add(usage("b", "sample", 1_000_000, 2_000_000_000))
    session.add(usage("b", "storage", 10**12, 500_000_000))
    session.add(usage("b", "sample", 5, 7, UNTIL))


def test_costs_follow_use_and_add_up(any_database: Database) -> None:
    any_database.write_now(fill)
    with any_database.read() as session:
        found = ownership(session, SINCE, UNTIL, gpu_hour=HOUR, gpus=2)
    assert found.cost_usd == pytest.approx(2 * 10 * 2)
    a, b = found.margins
    assert (a.machine_s, b.machine_s) == pytest.approx((750, 3250))
    assert (a.cost_usd, b.cost_usd) == pytest.approx((40 * 750 / 4000, 40 * 3250 / 4000))
    assert sum(row.cost_usd for row in found.margins) == pytest.approx(found.cost_usd)
    assert (a.paid_usd, b.paid_usd) == (6.0, 2.5)
    assert a.margin_usd == pytest.approx(6 - 7.5)
    assert (a.price_usd_per_mtok, a.cost_usd_per_mtok) == pytest.approx((3.0, 3.75))
    assert b.tokens == 1_000_000  # storage is paid for, but is no token
    assert found.utilisation == pytest.approx(4000 / 72_000)
    assert found.tokens_per_s_per_gpu == pytest.approx(3e6 / 36_000 / 2)
    assert (found.price_usd_per_mtok, found.cost_usd_per_mtok) == pytest.approx((8.5 / 3, 40 / 3))


def test_an_idle_service_costs_all_the_same(any_database: Database) -> None:
    with any_database.read() as session:
        found = ownership(session, SINCE, UNTIL, gpu_hour=HOUR, gpus=2)
    assert (found.margins, found.cost_usd, found.utilisation, found.cost_usd_per_mtok) == ([], 40.0, 0.0, 0.0)


def test_no_machine_is_charged_for_a_time_before_the_service(any_database: Database) -> None:
    any_database.write_now(fill)
    with any_database.read() as session:
        month = ownership(session, SINCE - timedelta(days=30), UNTIL, gpu_hour=HOUR, gpus=2)
        later = ownership(session, SINCE + timedelta(hours=8), UNTIL, gpu_hour=HOUR, gpus=2)
    assert (month.since, month.cost_usd) == (SINCE, 40.0)
    assert later.cost_usd == 8.0


def test_time_that_several_shared_is_counted_once() -> None:
    assert covered_s([(0, 4), (2, 6), (3, 5), (10, 11)]) == 7
    assert covered_s([]) == 0
