"""Usage has exactly what each route declares to meter. Made from the table of routes: each is asked with things of its
own organisation, its operations settle with usage of every kind, and an hour later storage is metered."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from weft.wire.binary.train_codec import encode_train_request

from api.http.access import Meter
from billing.metering import storage
from billing.prices import load_prices
from store.tables import Operation, StorageSpan, UsageEvent
from tests.api.conftest import PROTOBUF, World
from tests.api.data import batch
from tests.tenancy.conftest import Route
from tests.tenancy.test_cross_tenant import ROUTES, ask, short, things

KINDS: dict[Meter, set[str]] = {
    "train": {"train"},
    "prefill": {"prefill"},
    "sample": {"prefill", "cached_prefill", "sample"},
    "storage": {"storage"},
    "nothing": set(),
}
#: Everything that a worker could report of an operation.
FACTS = {"tokens": 5, "prefill": 3, "cached_prefill": 2, "sample": 4, "size_bytes": 10**9}
CHANGING = [route for route in ROUTES if route.access is not None and route.method != "GET"]


def ids_of(world: World, column: Any) -> set[str]:
    with world.database.read() as session:
        return {found for (found,) in session.query(column)}


def kinds_after(world: World, operations: set[str], spans: set[str]) -> set[str]:
    """The kinds of usage that are recorded beyond those that already were."""
    for operation in sorted(ids_of(world, Operation.id) - operations):
        assert world.operation(operation).state != "failed"  # it was not refused at once
        world.finish(operation, b"", **FACTS)
    storage.meter(world.database, load_prices(), datetime.now(UTC) + timedelta(hours=2))
    with world.database.read() as session:
        rows = session.query(UsageEvent.operation_id, UsageEvent.kind).all()
    return {kind for of, kind in rows if of not in operations and of.split(":")[1:2] not in [[span] for span in spans]}


@pytest.mark.parametrize("route", CHANGING, ids=short)
def test_a_route_meters_what_it_declares(world: World, route: Route) -> None:
    ids = things(world)
    before = ids_of(world, Operation.id), ids_of(world, StorageSpan.id)
    if short(route) == "POST /forward":  # the body in the table has no data
        datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": TARGETS}
        body = {"model_id": ids["run_id"], "seq_id": 52, "forward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
        reply = world.call("POST", "forward", json=body)
    else:
        reply = ask(world, route, ids, world.key)
    assert route.access is not None
    if route.access.meters != "nothing":
        assert reply.status_code == 200, reply.text
    assert kinds_after(world, *before) == KINDS[route.access.meters]


TARGETS = {
    "target_tokens": {"data": [1, 2], "dtype": "int64", "shape": [2]},
    "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
}


def test_forward_only_is_prefill_whatever_its_address(world: World) -> None:
    run = world.run()
    before = ids_of(world, Operation.id), ids_of(world, StorageSpan.id)
    sent = encode_train_request(batch(run, 1, forward_only=True))
    assert world.call("POST", "forward_backward", content=sent, headers=PROTOBUF).status_code == 200
    assert kinds_after(world, *before) == KINDS["prefill"]
