"""Balance, ledger and budgets over HTTP: exact, of one organisation, and refusing with 402."""

from __future__ import annotations

from typing import Any

import pytest

from billing.money import ledger
from billing.money.wallets import set_mode
from billing.reports.reconcile import check
from store.tables import ApiKey, Operation
from tests.api.conftest import World
from tests.api.data import batch


def org_of(world: World) -> str:
    with world.database.read() as session:
        return str(session.query(Operation.org_id).distinct().one()[0])


def pay(world: World, amount_nusd: int) -> None:
    org_id = org_of(world)
    world.database.write_now(lambda session: set_mode(session, org_id, "prepaid", 0))
    world.database.write_now(
        lambda session: ledger.post(
            session, org_id=org_id, type="topup", amount_nusd=amount_nusd, ref_type="t", ref_id="t", memo="thanks"
        )
    )


def test_a_balance_from_hold_to_charge(world: World) -> None:
    run = world.run()
    assert world.get("weft/balance")["balance_nusd"] is None
    pay(world, 10**9)
    first = world.train(batch(run, 1))
    held = world.get("weft/balance")["held_nusd"]
    assert held > 0
    assert [world.get(f"weft/usage{of}")["held_nusd"] for of in ("", f"?run_id={run}")] == [held, held]
    assert world.get("weft/usage", key=world.other_key)["held_nusd"] == 0
    assert world.get("weft/balance")["available_nusd"] == 10**9 - held
    world.finish(first["request_id"], b"x", tokens=held // 400)
    balance = world.get("weft/balance")
    assert (balance["held_nusd"], balance["balance_nusd"], balance["mode"]) == (0, 10**9 - held, "prepaid")
    entries = world.get("weft/ledger")["entries"]
    assert [(entry["type"], entry["amount_nusd"]) for entry in entries] == [("usage", -held), ("topup", 10**9)]
    page = world.get("weft/ledger?limit=1")
    assert world.get(f"weft/ledger?limit=1&before={page['next_before']}")["entries"] == entries[1:]
    assert world.get("weft/ledger", key=world.other_key)["entries"] == []
    usage = world.get(f"weft/usage?run_id={run}")
    assert (usage["total_nusd"], usage["held_nusd"]) == (held, 0)
    assert check(world.database) == []


def test_402_takes_no_number_and_a_failure_gives_back(world: World) -> None:
    run = world.run()
    pay(world, 1)
    told = world.train(batch(run, 1), status=402)
    assert (told["code"], told["available_nusd"], told["held_nusd"]) == ("out_of_money", 1, 0)
    assert told["needed_nusd"] > 1
    assert "the prepaid balance does not allow" in told["detail"]
    world.database.write_now(lambda session: set_mode(session, org_of(world), "prepaid", 10**9))
    accepted = world.train(batch(run, 1))  # the same number
    assert world.get("weft/balance")["held_nusd"] == told["needed_nusd"]
    assert world.train(batch(run, 1)) == accepted  # a repeat holds nothing again
    assert world.get("weft/balance")["held_nusd"] == told["needed_nusd"]
    assert check(world.database) == []


def test_results_are_given_out_without_money(world: World) -> None:
    run = world.run()
    pay(world, 10**9)
    request_id = world.train(batch(run, 1))["request_id"]
    world.finish(request_id, b"x", tokens=1)
    org_id = org_of(world)
    world.database.write_now(
        lambda session: ledger.post(
            session, org_id=org_id, type="chargeback", amount_nusd=-2 * 10**9, ref_type="t", ref_id="c"
        )
    )
    assert world.outcome(request_id).status_code == 200
    world.train(batch(run, 2), status=402)


def test_who_changes_a_budget_has_the_lock_of_its_organisation_before_anything_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the lock came later, behind those of works in the same transaction, two servers could wait for each other."""
    locks, write = list[str](), world.database.write

    async def noted(work: Any, *, lock: str = "") -> Any:
        locks.append(lock)
        return await write(work, lock=lock)

    monkeypatch.setattr(world.database, "write", noted)
    made = world.call("PUT", "weft/budgets", json={"scope": "org", "period": "month", "limit_nusd": 5}).json()
    world.call("DELETE", f"weft/budgets/{made['id']}")
    with world.database.read() as session:
        org_id = session.get_one(ApiKey, world.get("weft/keys")["keys"][0]["id"]).org_id
    assert locks == [org_id, org_id]


def test_budgets(world: World) -> None:
    run = world.run()
    body = {"scope": "key", "scope_id": "1", "limit_nusd": 0}
    made = world.call("PUT", "weft/budgets", json=body).json()
    assert (made["scope"], made["period"], made["left_nusd"], made["hard"]) == ("key", "month", 0, True)
    assert world.get("weft/budgets")["budgets"] == [made]
    assert world.get("weft/budgets", key=world.other_key)["budgets"] == []
    assert "the budget of the key 1" in world.train(batch(run, 1), status=402)["detail"]
    assert world.call("DELETE", f"weft/budgets/{made['id']}", key=world.other_key).status_code == 404
    assert world.call("DELETE", f"weft/budgets/{made['id']}").status_code == 200
    world.train(batch(run, 1))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"scope": "key", "scope_id": "2", "limit_nusd": 1}, 404),  # the other organisation's
        ({"scope": "key", "scope_id": "01", "limit_nusd": 1}, 404),  # it would not count key 1
        ({"scope": "key", "scope_id": "١", "limit_nusd": 1}, 404),
        ({"scope": "project", "scope_id": "nobody's", "limit_nusd": 1}, 404),
        ({"scope": "project", "limit_nusd": 1}, 400),
        ({"scope": "org", "scope_id": "x", "limit_nusd": 1}, 400),
        ({"scope": "org", "limit_nusd": -1}, 422),
        ({"scope": "team", "limit_nusd": 1}, 422),
    ],
)
def test_mistakes(world: World, body: dict[str, object], status: int) -> None:
    assert world.call("PUT", "weft/budgets", json=body).status_code == status
