"""Clients older than protobuf: JSON bodies and JSON results say the same as protobuf does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from weft.wire.binary.train_codec import ArrayDatum, decode_train_output

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.raw import RawClient, train_post

pytestmark = pytest.mark.server
TOKENS = list(range(40, 50))


@pytest.fixture(scope="module")
def client(weftd: Weftd) -> RawClient:
    return RawClient(weftd, "before-protobuf")


def as_json(client: RawClient, request_id: str) -> Any:
    """The result as a client gets it that accepts only JSON."""
    body = {"request_id": request_id}
    reply = client.http.post("/retrieve_future", json=body, headers={"Accept": "application/json"})
    assert reply.status_code == 200, reply.text
    return reply.json()


def given(**tensors: Any) -> dict[str, Any]:
    inputs = {
        "target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [9]},
        "weights": {"data": [1.0] * 9, "dtype": "float32", "shape": [9]},
        **tensors,
    }
    chunk = {"tokens": TOKENS[:-1], "type": "encoded_text"}
    return {"data": [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}], "loss_fn": "cross_entropy"}


def test_forward_and_forward_backward(client: RawClient) -> None:
    run_id = client.new_run()
    forward = client.json("forward", forward_input=given(), model_id=run_id, seq_id=1)
    backward = client.json("forward_backward", forward_backward_input=given(), model_id=run_id, seq_id=2)
    found, trained = as_json(client, forward["request_id"]), as_json(client, backward["request_id"])
    inputs = {"target_tokens": np.array(TOKENS[1:], dtype=np.int64), "weights": np.ones(9, dtype=np.float32)}
    datum = ArrayDatum(np.array(TOKENS[:-1], dtype=np.int32), inputs)
    same = client.post(train_post(run_id, 3, [datum], forward_only=True)).json()
    outputs, metrics = decode_train_output(client.result(same["request_id"]))
    logprobs = np.array(found["loss_fn_outputs"][0]["logprobs"]["data"], dtype=np.float32)
    np.testing.assert_array_equal(logprobs, outputs[0]["logprobs"])
    assert found["metrics"]["loss:sum"] == trained["metrics"]["loss:sum"] == metrics["loss:sum"]


def test_a_repeat_gets_the_first_id(client: RawClient) -> None:
    run_id = client.new_run()
    first, second = (client.json("forward", forward_input=given(), model_id=run_id, seq_id=1) for _ in range(2))
    assert first["request_id"] == second["request_id"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"forward_input": given()}, "forward_backward_input"),
        ({"forward_backward_input": given(weights={"data": [1.0], "dtype": "float32"})}, "weights"),
        ({"forward_backward_input": given(target_tokens={"data": [1.5] * 9, "dtype": "int64"})}, "target_tokens"),
        ({"forward_backward_input": given(weights={"data": [1.0], "dtype": "float16"})}, "dtype"),
        ({"forward_backward_input": given(), "surprise": 1}, "surprise"),
    ],
)
def test_what_is_wrong_is_told_through_the_future_and_the_run_goes_on(
    client: RawClient, body: dict[str, Any], named: str
) -> None:
    run_id = client.new_run()
    bad = client.json("forward_backward", model_id=run_id, seq_id=1, **body)
    failed = as_json(client, bad["request_id"])
    assert named in failed["error"]
    assert failed["category"] == "user"
    after = client.json("forward", forward_input=given(), model_id=run_id, seq_id=2)
    assert as_json(client, after["request_id"])["metrics"]["loss:sum"] > 0


def test_a_sample(client: RawClient) -> None:
    sampler = client.json(
        "create_sampling_session", session_id=client.session_id, sampling_session_seq_id=0, base_model=BASE_MODEL
    )
    future = client.json(
        "asample",
        prompt={"chunks": [{"tokens": TOKENS, "type": "encoded_text"}]},
        sampling_params={"max_tokens": 4, "temperature": 0.0, "stop": []},
        sampling_session_id=sampler["sampling_session_id"],
        seq_id=0,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
    )
    found = as_json(client, future["request_id"])
    (sequence,) = found["sequences"]
    assert len(sequence["tokens"]) == len(sequence["logprobs"]) == 4
    assert found["prompt_logprobs"][0] is None
    assert all(x < 0 for x in found["prompt_logprobs"][1:])
    assert found["topk_prompt_logprobs"][0] is None
    assert json.dumps(found)
