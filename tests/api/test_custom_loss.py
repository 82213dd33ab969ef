"""create_custom_loss, and operations that name what was made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from weft.wire.checks import custom_cost
from weft.wire.checks.custom_format import decode_custom_loss

from tests.api.conftest import World
from tests.api.data import batch, datum


def body(session: str, number: int = 0, function: str = "torch.exp") -> dict[str, Any]:
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_function", "name": "e", "target": function, "args": [{"ref": "logprobs"}]},
        {"op": "call_method", "name": "loss", "target": "sum", "args": [{"ref": "e"}]},
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "loss"}, {"dict": {"custom/e:sum": {"ref": "loss"}}}]}],
        },
    ]
    return {
        "session_id": session,
        "custom_loss_seq_id": number,
        "name": "e",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
        "type": "create_custom_loss",
    }


def test_a_loss_is_made_once_and_named_by_its_session(world: World) -> None:
    session = world.session()
    request_id = world.post("create_custom_loss", body(session))["request_id"]
    assert world.outcome(request_id).json() == {"loss_id": f"{session}:loss:0", "type": "create_custom_loss"}
    assert world.post("create_custom_loss", body(session))["request_id"] == request_id
    stored = world.service.blobs.get(f"losses/{session}:loss:0")
    assert decode_custom_loss(stored).loss == "loss"
    again = world.post("create_custom_loss", body(session, function="torch.log"), status=400)
    assert "another loss already" in again["detail"]


@pytest.mark.parametrize("number", ["1e400", "NaN", "1" + 400 * "0", "-9007199254740993"])
def test_a_number_that_no_argument_can_be_is_refused(world: World, number: str) -> None:
    """Not taken for null: clamp(min=None) is another loss."""
    asked = body(world.session(), function="torch.clamp")
    asked["graph"]["nodes"][1]["kwargs"] = {"min": "number"}
    content = json.dumps(asked).replace('"number"', number)
    reply = world.call("POST", "create_custom_loss", content=content)
    assert reply.status_code == 400, reply.text
    assert "graph node 'e': the number" in reply.json()["detail"]


def test_refusals(world: World) -> None:
    session = world.session()
    refused = world.post("create_custom_loss", body(session, function="torch.load"), status=400)["detail"]
    assert "'torch.load' is not one that a custom loss may call" in refused
    assert "a session may have 256" in world.post("create_custom_loss", body(session, 256), status=400)["detail"]
    world.post("create_custom_loss", body(session), key=world.other_key, status=404)
    world.post("create_custom_loss", body("nobody"), status=404)
    malformed = body(session)
    malformed["inputs"] = []
    world.post("create_custom_loss", malformed, status=422)
    large = body(session)
    large["graph"]["nodes"][0]["target"] = "x" * 300_000
    assert world.call("POST", "create_custom_loss", json=large).status_code == 413
    extra = body(session) | {"surprise": 1}
    world.post("create_custom_loss", extra, status=422)


def test_operations_name_a_loss_of_their_own_session(world: World) -> None:
    session, elsewhere = world.session(), world.session()
    run, other = world.run(session), world.run(elsewhere)
    world.post("create_custom_loss", body(session))
    config: dict[str, float | str] = {"loss_id": f"{session}:loss:0"}
    data = [datum([1, 2, 3])]
    good = world.train(batch(run, 1, data, loss_fn="custom", loss_fn_config=config))
    assert world.operation(good["request_id"]).state == "queued"
    for target, wrong, words in (
        (other, config, "no custom loss"),
        (run, {"loss_id": f"{session}:loss:1"}, "no custom loss"),
        (run, {"loss_id": f"{session}:loss:../../x"}, "no custom loss"),
        (run, {}, "its loss_id alone"),
        (run, {"loss_id": 3.0}, "its loss_id alone"),
        (run, config | {"beta": 1.0}, "its loss_id alone"),
    ):
        number = 2 if target == other else world.journal.training.runs[run].next_seq
        number = 1 if target == other else number
        reply = world.train(batch(target, number, data, loss_fn="custom", loss_fn_config=dict(wrong)))
        assert words in world.error(reply["request_id"])
    two = [datum([1, 2], target_tokens=[[1, 2], [3, 4]], weights=[[1.0, 1.0], [1.0, 1.0]])]
    number = world.journal.training.runs[run].next_seq
    reply = world.train(batch(run, number, two, loss_fn="custom", loss_fn_config=config))
    assert "declared rank 1" in world.error(reply["request_id"])


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def with_nodes(session: str, number: int, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """A loss with these nodes between its input and `loss`, the sum of the last one."""
    made = body(session, number)
    first, _, last, output = made["graph"]["nodes"]
    last["args"] = [ref(nodes[-1]["name"])]
    made["graph"]["nodes"] = [first, *nodes, last, output]
    return made


def call(name: str, target: str, *args: Any) -> dict[str, Any]:
    return {"op": "call_function", "name": name, "target": target, "args": list(args)}


def test_what_no_data_could_make_possible_is_refused_when_it_comes(world: World) -> None:
    """Three kilobytes whose tuples would have 4^40 members, and the norm of a matrix that needs a decomposition."""
    session = world.session()
    pair = {"tuple": [ref("t0"), ref("t0")]}
    grown = [call("t0", "getattr", ref("logprobs"), "shape"), call("t1", "operator.add", pair, pair)]
    for step in range(2, 41):
        pair = {"tuple": [ref(f"t{step - 1}"), ref(f"t{step - 1}")]}
        grown.append(call(f"t{step}", "operator.add", pair, pair))
    norm = [call("o", "torch.outer", ref("logprobs"), ref("logprobs")), call("x", "torch.norm", ref("o"), "nuc")]
    fine = [call("o", "torch.outer", ref("logprobs"), ref("logprobs")), call("x", "torch.norm", ref("o"), 2)]
    for nodes, words in ((grown, "more than 128 values"), (norm, "got 'nuc'")):
        assert words in world.post("create_custom_loss", with_nodes(session, 0, nodes), status=400)["detail"]
    world.post("create_custom_loss", with_nodes(session, 0, fine))


def test_a_loss_counts_in_the_fair_order_by_what_it_costs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One-token data cost as much as their loss's nodes: many of them make many slices, and too many are refused."""
    session = world.session()
    run = world.run(session)
    world.post("create_custom_loss", body(session))
    config: dict[str, float | str] = {"loss_id": f"{session}:loss:0"}
    reply = world.train(batch(run, 1, [datum([1])] * 8, loss_fn="custom", loss_fn_config=config))
    row = world.operation(reply["request_id"])
    assert row.tokens == 8
    # Ten of each: a token, two nodes, and one for up to 16,384 elements.
    assert row.plan["slices"] == [[at, at + 2, 2 * (1 + 2 + 1)] for at in range(0, 8, 2)]
    monkeypatch.setattr(custom_cost, "MAX_WORK", 20)
    reply = world.train(batch(run, 2, [datum([1])] * 8, loss_fn="custom", loss_fn_config=config))
    assert "would be 24 of work on 8 data; the limit is 20 for one operation" in world.error(reply["request_id"])


def test_data_that_a_loss_cannot_be_computed_on_are_refused_before_they_wait(world: World) -> None:
    session = world.session()
    run = world.run(session)
    world.post("create_custom_loss", with_nodes(session, 0, [call("x", "torch.reshape", ref("logprobs"), [2, -1])]))
    config: dict[str, float | str] = {"loss_id": f"{session}:loss:0"}
    data = [datum([1, 2]), datum([1, 2, 3])]
    reply = world.train(batch(run, 1, data, loss_fn="custom", loss_fn_config=config))
    assert "datum 1: custom loss 'e', node x (torch.reshape): shape [3] cannot" in world.error(reply["request_id"])
