"""The figures about money that monitoring reads equal the database's, and name nobody."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from api.server.prometheus import Stored, render
from billing.money import ledger
from billing.money.alerts import MoneyGauges, raise_alert, read_gauges, resolve_alert
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


def test_an_alert_for_the_operator_is_seen_until_it_is_over(world: World) -> None:
    """Monitoring pages the operator, who does not watch the console. Organisations' alerts are not for operators."""
    world.run()
    first = datetime.now(UTC).replace(microsecond=0)
    told = {"kind": "webhook_stuck", "message": "m"}
    for ref, at in ("a", first), ("b", first + timedelta(minutes=1)):
        world.database.write_now(lambda session, ref=ref, at=at: raise_alert(session, ref=ref, now=at, **told))
    world.database.write_now(
        lambda session: raise_alert(session, kind="budget", ref="c", message="m", now=first, org_id=org_of(world))
    )
    name = "weft_alert_raised_timestamp_seconds"
    assert {key: at for key, at in shown(world).items() if key.startswith(name)} == {
        f'{name}{{kind="webhook_stuck"}}': (first + timedelta(minutes=1)).timestamp()
    }
    for ref in ("a", "b"):
        world.database.write_now(
            lambda session, ref=ref: resolve_alert(session, kind="webhook_stuck", ref=ref, now=first)
        )
    assert not [key for key in shown(world) if key.startswith(name)]
