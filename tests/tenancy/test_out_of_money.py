"""With nothing left of a wallet or a hard budget no route makes anything any more. Made from the table of routes: a new
one is asked too, and fails this test until it refuses or is listed as one that makes nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from billing.money import ledger
from billing.money.budgets import set_budget
from billing.money.wallets import set_mode
from billing.reports.reconcile import check
from store.people import organisations
from store.tables import Checkpoint, Operation, Sampler, Session, StorageSpan
from tests.api.conftest import World
from tests.tenancy.conftest import Route, org_id_of
from tests.tenancy.test_cross_tenant import ROUTES, ask, short, things

#: Routes that only read, end, delete, or hand out what is stored; and those that must work for these.
MAKES_NOTHING = {
    "POST /session_heartbeat",
    "POST /create_session",
    "POST /create_sampling_session",
    "POST /join_sampling_session",
    "POST /sessions/search",
    "POST /sessions/{session_id}/finish",
    "PUT /sessions/{session_id}/project",
    "POST /get_info",
    "POST /weights_info",
    "POST /retrieve_future",
    "POST /retrieve_futures",
    "POST /stream_future",
    "POST /cancel_future",
    "POST /weft/runs/{run_id}/metrics",
    "PUT /weft/runs/{run_id}/notes",
    "DELETE /training_runs/{run_id}/checkpoints/{kind}/{name}",
    "DELETE /training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
}
WORK = {"train", "sample", "checkpoints:write"}
MAKING = [
    route
    for route in ROUTES
    if route.access is not None and route.method != "GET" and WORK & set(route.access.scopes)
    and short(route) not in MAKES_NOTHING
]  # fmt: skip


def made(world: World) -> list[int]:
    with world.database.read() as session:
        return [session.query(table).count() for table in (Operation, Checkpoint, Sampler, StorageSpan)]


def empty_wallet(world: World) -> None:
    world.database.write_now(lambda session: set_mode(session, org_id_of(world), "prepaid", 0))


def overdrawn(world: World) -> None:
    """A wallet below zero, from storage or a payment that was taken back."""
    empty_wallet(world)
    fields = {"type": "chargeback", "amount_nusd": -5 * 10**9, "ref_type": "t", "ref_id": "c"}
    world.database.write_now(lambda session: ledger.post(session, org_id=org_id_of(world), **fields))


def used_up_budget(world: World) -> None:
    org_id = org_id_of(world)
    world.database.write_now(lambda session: set_budget(session, org_id, "org", org_id, "month", 0))


def used_up_key(world: World) -> None:
    world.database.write_now(lambda session: set_budget(session, org_id_of(world), "key", "1", "total", 0))


def used_up_project(world: World) -> None:
    """A used-up budget of the project that all sessions are in; the key is bound to none."""
    org_id = org_id_of(world)
    project_id = world.database.write_now(lambda session: organisations.create_project(session, org_id, "spent").id)
    with world.database.read() as session:
        sessions = session.query(Session.id).filter_by(org_id=org_id).all()
    for (session_id,) in sessions:
        world.call("PUT", f"sessions/{session_id}/project", json={"project_id": project_id})
    world.database.write_now(lambda session: set_budget(session, org_id, "project", project_id, "total", 0))


NOTHING_LEFT: list[tuple[Callable[[World], None], str]] = [
    (empty_wallet, "the prepaid balance does not allow this operation: it is used up"),
    (overdrawn, "the balance is -$5.000000000, $0.000000000 may be owed"),
    (used_up_key, "the budget of the key 1 in total does not allow this operation: it is used up"),
    (used_up_project, "the budget of the project "),
    (used_up_budget, "the budget of the organisation in "),
]


@pytest.mark.parametrize("route", MAKING, ids=short)
def test_what_makes_something_needs_money(world: World, route: Route) -> None:
    ids = things(world)
    path = "training_runs/{run_id}/checkpoints/{kind}/{name}/ttl".format(**ids)
    assert world.call("PUT", path, json={"ttl_seconds": 3600}).status_code == 200  # for the route that extends it
    before = made(world)
    prices = {"forward_backward": "it can cost", "asample": "it can cost"}
    for nothing_left, told in NOTHING_LEFT[:2] if short(route).endswith("asample") else NOTHING_LEFT:
        if nothing_left is used_up_project and short(route) == "POST /copy_weights":  # goes to `default`, no project
            continue
        nothing_left(world)
        if short(route) == "POST /forward":  # the table's body has no data, so that is what it is refused for
            continue
        reply = ask(world, route, ids, world.key)
        assert reply.status_code == 402, (route, reply.text)
        assert reply.json()["code"] == "out_of_money"
        if route.path.rpartition("/")[2] not in prices:
            assert told in reply.json()["detail"]
            assert reply.json()["needed_nusd"] == 0
        assert made(world) == before
        org_id = org_id_of(world)
        world.database.write_now(lambda session, of=org_id: set_mode(session, of, "unlimited", 0))
    assert check(world.database) == []


def test_with_a_nano_dollar_left_saves_and_steps_go_on(world: World) -> None:
    ids = things(world)
    empty_wallet(world)
    fields = {"type": "topup", "amount_nusd": 1, "ref_type": "t", "ref_id": "c"}
    world.database.write_now(lambda session: ledger.post(session, org_id=org_id_of(world), **fields))
    for number, path in ((81, "save_weights"), (82, "save_weights_external")):
        world.post(path, {"model_id": ids["run_id"], "seq_id": number, "path": f"x{number}"})


def test_a_mistake_is_named_before_the_money(world: World) -> None:
    """It uses its sequence number as ever: otherwise a client that waits for money would wait for nothing."""
    ids = things(world)
    empty_wallet(world)
    told = world.post("save_weights", {"model_id": ids["run_id"], "seq_id": 83, "path": "a/b"}, status=422)
    assert "path" in told["detail"]
    assert datetime.now(UTC) > world.operation(told["request_id"]).accepted_at
