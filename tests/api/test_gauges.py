"""What monitoring reads of the money is what the database says, and names nobody."""

from __future__ import annotations

from datetime import UTC, datetime

from api.server.prometheus import Stored, render
from billing.money import ledger
from billing.money.alerts import MoneyGauges, read_gauges
from billing.money.wallets import set_mode
from scheduler.jobs.catalogue import JOBS
from scheduler.jobs.registry import JobContext
from scheduler.jobs.running import run_now
from store.tables import Wallet
from tests.api.conftest import World
from tests.api.data import batch
from tests.api.test_money import org_of, pay
from tests.api.test_prometheus import values


def gauges(world: World) -> MoneyGauges:
    with world.database.read() as session:
        return read_gauges(session, datetime.now(UTC))


def shown(world: World) -> dict[str, float]:
    return values(render(world.service.journal.meters, {}, Stored(gauges(world))))


def test_holds_and_refusals(world: World) -> None:
    run = world.run()
    assert shown(world)["weft_holds_open"] == 0
    pay(world, 10**9)
    request_id = world.train(batch(run, 1))["request_id"]
    held = world.get("weft/balance")["held_nusd"]
    found = shown(world)
    assert (found["weft_holds_open"], found["weft_hold_amount_usd"]) == (1, held / 1e9)
    world.database.write_now(
        lambda session: ledger.post(
            session, org_id=org_of(world), type="adjustment", amount_nusd=held - 10**9, ref_type="t", ref_id="a"
        )
    )
    for _ in range(2):
        world.train(batch(run, 2), status=402)
    world.call("PUT", "weft/budgets", json={"scope": "org", "limit_nusd": 0})
    world.database.write_now(lambda session: set_mode(session, org_of(world), "unlimited", 0))
    world.train(batch(run, 2), status=402)
    found = shown(world)
    assert found['weft_budget_denied_total{scope="wallet"}'] == 2
    assert found['weft_budget_denied_total{scope="org"}'] == 1
    world.finish(request_id, b"x", tokens=1)
    assert (shown(world)["weft_holds_open"], shown(world)["weft_hold_amount_usd"]) == (0, 0)


def test_drift_and_jobs(world: World) -> None:
    service = world.service
    context = JobContext(world.database, service.blobs, service.settings, service.prices)
    assert "weft_ledger_drift_nusd" not in shown(world)
    before = datetime.now(UTC).timestamp()
    run_now(context, JOBS["reconcile"])
    found = shown(world)
    assert found["weft_ledger_drift_nusd"] == 0
    assert found['weft_job_last_success_timestamp_seconds{name="reconcile"}'] >= before
    world.run()
    pay(world, 100)

    def err(session: object) -> None:
        session.get_one(Wallet, org_of(world)).balance_nusd += 7  # type: ignore[attr-defined]

    world.database.write_now(err)
    run_now(context, JOBS["reconcile"])
    assert shown(world)["weft_ledger_drift_nusd"] == 7
