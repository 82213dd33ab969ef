"""Runs against a real HTTP stub: order, resends, error mapping, chunks, custom losses."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import weft
from starlette.responses import JSONResponse, Response
from weft import AdamParams, Datum, ModelInput, RetryPolicy, ServiceClient, TrainingClient
from weft.transport.poll import SHORTEST_ROUND_S
from weft.wire.binary.train_codec import decode_train_request

from tests.client_sdk.conftest import FAST
from tests.client_sdk.stub_server import SESSION, Stub, not_yet, page, status


def datum(*targets: int, weights: list[float] | None = None) -> Datum:
    inputs = {"target_tokens": list(targets), "weights": weights or [1.0] * len(targets)}
    return Datum(model_input=ModelInput.from_ints(list(targets)), loss_fn_inputs=inputs)


def run_of(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("org/tiny", rank=8, seed=1)


def train_seqs(stub: Stub) -> list[int]:
    """Numbers of all submitted operations, in order of arrival."""
    seqs = []
    for asked in stub.asked:
        if asked.path == "/forward_backward":
            seqs.append(decode_train_request(asked.body).seq_id)
        elif asked.path in ("/optim_step", "/save_weights", "/save_weights_for_sampler"):
            seqs.append(asked.json["seq_id"])
    return seqs


def test_a_step(service: ServiceClient, stub: Stub) -> None:
    training = run_of(service)
    backward = training.forward_backward([datum(1, 2), datum(3)], "cross_entropy")
    update = training.optim_step(AdamParams(learning_rate=1e-3))

    output = backward.result(10)
    assert [out["logprobs"].data for out in output.loss_fn_outputs] == [[-1.0, -2.0], [-3.0]]
    assert output.loss_fn_outputs[0]["logprobs"].to_torch().tolist() == [-1.0, -2.0]
    assert output.metrics == {"loss:sum": 6.0, "tokens:max": 2.0}
    assert update.result(10).metrics == {"norm": 1.0}
    assert training.model_id == f"{SESSION}:train:0"
    assert training.get_info().lora_rank == 8
    made = stub.bodies("/create_model")[0]
    assert made["lora_config"] == {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
    assert all(asked.headers["x-api-key"] == "tml-test" for asked in stub.asked)


def test_operations_arrive_in_call_order_and_without_waiting_for_results(service: ServiceClient, stub: Stub) -> None:
    stub.faults["/retrieve_future"] = [not_yet()] * 3
    training = run_of(service)
    futures = [training.forward_backward([datum(n)], "cross_entropy") for n in range(1, 6)]
    futures += [training.optim_step(AdamParams()), training.save_state("s1")]  # type: ignore[list-item]
    for future in futures:
        future.result(10)

    assert train_seqs(stub) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_a_passing_failure_is_resent_with_the_same_number_and_bytes(
    patient: ServiceClient, stub: Stub, code: int
) -> None:
    stub.faults["/optim_step"] = [status(code), status(code)]
    run_of(patient).optim_step(AdamParams()).result(10)

    sent = [asked for asked in stub.asked if asked.path == "/optim_step"]
    assert len(sent) == 3
    assert len({asked.body for asked in sent}) == 1
    assert len({asked.headers["x-idempotency-key"] for asked in sent}) == 1
    assert sent[0].json["seq_id"] == 1


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, weft.BadRequestError),
        (401, weft.AuthenticationError),
        (403, weft.PermissionDeniedError),
        (404, weft.NotFoundError),
        (409, weft.ConflictError),
        (422, weft.UnprocessableEntityError),
    ],
)
def test_a_final_refusal_is_typed_and_uses_its_number(
    service: ServiceClient, stub: Stub, code: int, error: type[weft.APIStatusError]
) -> None:
    refusal = {"detail": "data[0]: too long", "code": "no", "request_id": "operation-1"}
    stub.faults["/optim_step"] = [JSONResponse(refusal, code, {"x-request-id": "request-1"})]
    training = run_of(service)
    with pytest.raises(error, match=r"data\[0\]: too long") as caught:
        training.optim_step(AdamParams()).result(10)

    assert (caught.value.status_code, caught.value.request_id) == (code, "operation-1")
    assert len(stub.bodies("/optim_step")) == 1
    training.optim_step(AdamParams()).result(10)
    assert stub.bodies("/optim_step")[1]["seq_id"] == 2


@pytest.mark.parametrize("code", [301, 400, 401, 403, 404, 405, 409, 411, 413, 415, 421, 422, 431, 451])
@pytest.mark.parametrize("path", ["/optim_step", "/save_weights", "/forward_backward"])
def test_what_a_proxy_refuses_uses_no_number(service: ServiceClient, stub: Stub, path: str, code: int) -> None:
    """If it counted, the number would be missing on the server, and everything after it would wait for it."""
    stub.faults[path] = [page(code)] * (1000 if code == 404 else 1)  # a 404 may come from a restart, and is tried again
    training = run_of(service)
    ways: dict[str, Callable[[], weft.APIFuture[Any]]] = {
        "/optim_step": lambda: training.optim_step(AdamParams()),
        "/save_weights": lambda: training.save_state("a"),
        "/forward_backward": lambda: training.forward_backward([datum(1)], "cross_entropy"),
    }
    with pytest.raises(weft.APIStatusError):
        ways[path]().result(10)
    training.save_weights_for_sampler("b").result(10)
    assert [body["seq_id"] for body in stub.bodies("/save_weights_for_sampler")] == [1]


@pytest.mark.parametrize(
    ("code", "body", "then"),
    [
        (401, {"code": "unauthenticated", "request_id": "request-1"}, 1),
        (403, {"code": "organisation_suspended", "request_id": "request-1"}, 1),
        (413, {"code": "body_too_large", "request_id": "request-1"}, 1),
        (413, {"code": "quota_reached", "request_id": "operation-1"}, 2),
        (400, {"code": "invalid_request", "request_id": "request-1"}, 2),  # as for a number that is used already
    ],
)
def test_a_refusal_before_the_body_is_read_uses_no_number(
    service: ServiceClient, stub: Stub, code: int, body: dict[str, str], then: int
) -> None:
    stub.faults["/optim_step"] = [JSONResponse({"detail": "no", **body}, code, {"x-request-id": "request-1"})]
    training = run_of(service)
    with pytest.raises(weft.APIStatusError):
        training.optim_step(AdamParams()).result(10)
    training.optim_step(AdamParams()).result(10)
    assert [body["seq_id"] for body in stub.bodies("/optim_step")] == [1, then]


def test_a_router_that_misses_the_server_for_a_while_loses_nothing(patient: ServiceClient, stub: Stub) -> None:
    training = run_of(patient)
    training.result(10)
    stub.faults["/optim_step"] = [page(404)] * 3
    stub.faults["/retrieve_future"] = [page(404), page(200), page(502)]
    training.optim_step(AdamParams()).result(10)
    assert [body["seq_id"] for body in stub.bodies("/optim_step")] == [1] * 4


def test_billing_pauses_and_goes_on_and_says_so_once_for_all(
    patient: ServiceClient, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.faults["/optim_step"] = [status(402, "out of credit")] * 6
    with caplog.at_level(logging.WARNING, "weft"):
        for step in [run_of(patient).optim_step(AdamParams()) for _ in range(3)]:
            step.result(10)
    assert len(stub.bodies("/optim_step")) == 9
    assert sum("out of credit" in message for message in caplog.messages) == 1


def test_billing_gives_up_in_the_end(service: ServiceClient, stub: Stub) -> None:
    stub.faults["/optim_step"] = [status(402, "out of credit")] * 100
    with pytest.raises(weft.BillingError, match="out of credit"):
        run_of(service).optim_step(AdamParams()).result(10)


def test_who_waits_for_a_server_that_cannot_serve_is_told_why_once(
    patient: ServiceClient, stub: Stub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.transport.http.TOLD_AFTER_S", 0.0)
    stub.faults["/optim_step"] = [status(503, "the disk is nearly full")] * 5
    with caplog.at_level(logging.WARNING, "weft"):
        run_of(patient).optim_step(AdamParams()).result(10)
    told = [record.getMessage() for record in caplog.records]  # other clients may miss their servers meanwhile
    told = [message.partition(": ")[2][:23] for message in told if message.startswith("again in")]
    assert told == ["the disk is nearly full"]


def test_an_operation_of_unknown_fate_breaks_the_lane(service: ServiceClient, stub: Stub) -> None:
    stub.faults["/optim_step"] = [status(503)] * 1000
    training = run_of(service)
    with pytest.raises(weft.InternalServerError):
        training.optim_step(AdamParams()).result(10)
    with pytest.raises(weft.LaneBrokenError):
        training.optim_step(AdamParams()).result(10)


@pytest.mark.parametrize("then", [[], [status(503)] * 3], ids=["", "and the restart behind it"])
def test_a_full_queue_is_waited_out(service: ServiceClient, stub: Stub, then: list[Response]) -> None:
    stub.faults["/optim_step"] = [status(429)] * 120 + then  # longer than the retry budget
    run_of(service).optim_step(AdamParams()).result(20)


def test_polls_go_on_through_408_and_outages(service: ServiceClient, stub: Stub) -> None:
    training = run_of(service)
    training.result(10)
    stub.faults["/retrieve_future"] = [not_yet(), status(503), not_yet(), status(429), not_yet()]
    assert training.optim_step(AdamParams()).result(10).metrics == {"norm": 1.0}


@pytest.mark.parametrize("code", [200, 408])
def test_a_poll_says_why_it_waits_and_hammers_nobody(
    service: ServiceClient, stub: Stub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("weft.transport.poll._last_told_s", -math.inf)
    training = run_of(service)
    training.result(10)
    held = {"type": "try_again", "request_id": "r", "queue_state": "paused_capacity", "queue_state_reason": "no room"}
    stub.faults["/retrieve_future"] = [JSONResponse(held, code) for _ in range(10)]
    began = time.monotonic()
    training.optim_step(AdamParams()).result(10)
    assert time.monotonic() - began >= 9 * SHORTEST_ROUND_S
    assert caplog.text.count("waiting: no room") == 1


def test_an_outage_that_lasts_ends_a_poll(service: ServiceClient, stub: Stub) -> None:
    training = run_of(service)
    training.result(10)
    stub.faults["/retrieve_future"] = [status(503, "still away")] * 10_000
    with pytest.raises(weft.InternalServerError, match="still away"):
        training.optim_step(AdamParams()).result(20)


def test_a_result_that_cannot_be_read_says_whose_it_is(service: ServiceClient, stub: Stub) -> None:
    training = run_of(service)
    training.result(10)
    stub.faults["/retrieve_future"] = [Response(b"\xff", media_type="application/x-protobuf")]
    with pytest.raises(weft.APIResponseValidationError, match="result of request r-"):
        training.forward([datum(1, 2)], "cross_entropy").result(10)


def test_a_failed_operation_raises_and_the_run_goes_on(service: ServiceClient, stub: Stub) -> None:
    training = run_of(service)
    training.result(10)
    stub.results[f"r-{SESSION}:train:0-1"] = JSONResponse({"error": "NaN in data[3]", "category": "user"})
    with pytest.raises(weft.RequestFailedError, match="NaN in data") as caught:
        training.forward_backward([datum(1)], "ppo").result(10)

    assert (caught.value.category, caught.value.request_id) == ("user", f"r-{SESSION}:train:0-1")
    assert training.forward_backward([datum(1)], "ppo").result(10).metrics["tokens:max"] == 1.0


def test_large_data_go_in_parts_one_after_the_other(service: ServiceClient, stub: Stub) -> None:
    stub.config = {"fwdbwd_max_chunk_len": 2}
    training = run_of(service)
    output = training.forward_backward([datum(n) for n in range(1, 6)], "cross_entropy", {"x": 1.0}).result(10)
    training.optim_step(AdamParams()).result(10)

    assert train_seqs(stub) == [1, 2, 3, 4]
    assert [out["logprobs"].data for out in output.loss_fn_outputs] == [[-1.0], [-2.0], [-3.0], [-4.0], [-5.0]]
    assert output.metrics == {"loss:sum": 15.0, "tokens:max": 2.0}


def test_forward_only_is_a_flag(service: ServiceClient, stub: Stub) -> None:
    run_of(service).forward([datum(1)], "cross_entropy").result(10)
    [asked] = [asked for asked in stub.asked if asked.path == "/forward_backward"]
    assert decode_train_request(asked.body).forward_only


def test_custom_loss_sends_minus_its_gradient_as_weights(service: ServiceClient, stub: Stub) -> None:
    def loss(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = (logprobs[0] ** 2).sum() + 3 * logprobs[1].sum()
        return total, {"mine": 7.0}

    stub.config = {"fwdbwd_max_chunk_len": 1}
    training = run_of(service)
    custom = training.forward_backward_custom([datum(1, 2), datum(5)], loss)
    update = training.optim_step(AdamParams())
    output = custom.result(10)
    update.result(10)

    sent = [decode_train_request(asked.body) for asked in stub.asked if asked.path == "/forward_backward"]
    assert [(batch.forward_only, batch.seq_id) for batch in sent] == [(True, 1), (True, 2), (False, 3), (False, 4)]
    assert sent[2].data[0].inputs["weights"].tolist() == [2.0, 4.0]
    assert sent[3].data[0].inputs["weights"].tolist() == [-3.0]
    assert stub.bodies("/optim_step")[0]["seq_id"] == 5
    assert output.metrics["loss:sum"] == 5.0 - 15.0
    assert output.metrics["mine"] == 7.0
    assert "surrogate_loss:sum" in output.metrics


def test_a_custom_loss_that_raises_leaves_no_gap(service: ServiceClient, stub: Stub) -> None:
    def loss(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        raise ZeroDivisionError

    training = run_of(service)
    with pytest.raises(ZeroDivisionError):
        training.forward_backward_custom([datum(1)], loss).result(10)
    with pytest.raises(weft.GradientMissingError, match="not sent"):
        training.optim_step(AdamParams()).result(10)
    training.optim_step(AdamParams()).result(10)
    assert train_seqs(stub) == [1, 2]


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda _, logprobs: logprobs[0].sum(), r"must return \(loss, metrics\).*yours returned tensor\("),
        (lambda _, logprobs: None, "yours returned None"),
        (lambda _, logprobs: (logprobs[0].sum(), None), r"a dict of numbers; yours returned \(tensor.*None\)"),
        (lambda _, logprobs: (1.0, {}), r"a tensor of one element .*yours returned \(1\.0"),
        (lambda _, logprobs: (logprobs[0], {}), r"yours returned \(tensor"),
        (
            lambda _, logprobs: (logprobs[0].sum(), {"a": logprobs[0]}),
            "metric 'a' of your loss must be one number, got",
        ),
        (lambda _, logprobs: (logprobs[0].sum(), {"a": "x"}), "metric 'a' of your loss must be one number, got 'x'"),
    ],
)
def test_what_a_custom_loss_must_return_is_said(service: ServiceClient, loss: Any, told: str) -> None:
    with pytest.raises(weft.WeftError, match=told):
        run_of(service).forward_backward_custom([datum(1, 2)], loss).result(10)


def test_custom_loss_without_torch_says_so(service: ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch"):
        run_of(service).forward_backward_custom([datum(1)], lambda data, logprobs: (logprobs[0].sum(), {}))


def test_a_run_that_cannot_be_made_fails_every_use(service: ServiceClient, stub: Stub) -> None:
    stub.faults["/create_model"] = [status(404, "no model org/tiny")]
    training = run_of(service)
    with pytest.raises(weft.NotFoundError, match="no model"):
        training.result(10)
    with pytest.raises(weft.LaneBrokenError, match="no model"):
        training.optim_step(AdamParams()).result(10)


def test_saves_and_loads(service: ServiceClient, stub: Stub) -> None:
    training = run_of(service)
    path = training.save_state("step-1", ttl_seconds=3600).result(10).path
    assert path == f"tinker://{SESSION}:train:0/weights/step-1"
    training.load_state_with_optimizer(path).result(10)
    assert training.save_weights_for_sampler("final").result(10).path.endswith("/sampler_weights/final")
    again = service.create_training_client_from_state_with_optimizer(path)

    assert again.model_id == f"{SESSION}:train:1"
    in_place, new = stub.bodies("/load_weights")
    assert in_place == {
        "path": path,
        "optimizer": True,
        "model_id": f"{SESSION}:train:0",
        "seq_id": 2,
        "type": "load_weights",
    }
    assert new == {
        "path": path,
        "optimizer": True,
        "session_id": SESSION,
        "model_seq_id": 1,
        "type": "load_weights",
    }
    with pytest.raises(ValueError, match=r"^name: .*got 'a/b'"):
        training.save_state("a/b")


def test_the_async_twins(service: ServiceClient, stub: Stub) -> None:
    async def loop() -> tuple[dict[str, float], list[int]]:
        training = await service.create_lora_training_client_async("org/tiny")
        backward = await training.forward_backward_async([datum(1)], "cross_entropy")
        update = await training.optim_step_async(AdamParams())
        await update
        sampler = await training.save_weights_and_get_sampling_client_async()
        drawn = await sampler.sample_async(ModelInput.from_ints([1, 2]), 1, weft.SamplingParams(max_tokens=2))
        return (await backward).metrics, drawn.sequences[0].tokens

    assert asyncio.run(loop()) == ({"loss:sum": 1.0, "tokens:max": 1.0}, [1, 2])


def test_the_session_ends_with_its_block(stub: Stub) -> None:
    with ServiceClient(base_url=stub.base_url, api_key="tml-test", display_name="d") as service:
        run_of(service).result(10)
    with pytest.raises(weft.WeftError, match="closed"):
        run_of(service).result(10)
    assert stub.bodies("/create_session")[0]["display_name"] == "d"
    assert stub.bodies(f"/sessions/{SESSION}/finish") == [{"reason": {"type": "success"}, "detail": None}]


def test_a_block_that_raises_ends_errored(stub: Stub) -> None:
    def block() -> None:
        with ServiceClient(base_url=stub.base_url, api_key="tml-test") as service:
            run_of(service).result(10)
            raise KeyError("x")

    with pytest.raises(KeyError):
        block()
    assert stub.bodies(f"/sessions/{SESSION}/finish")[0]["reason"] == {"type": "errored"}


def test_heartbeats_until_410(service: ServiceClient, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.runs.session.HEARTBEAT_S", 0.02)
    stub.faults["/session_heartbeat"] = [status(200), status(500), status(410)]
    run_of(service).result(10)
    time.sleep(0.3)
    assert stub.bodies("/session_heartbeat") == [{"session_id": SESSION, "type": "session_heartbeat"}] * 3


def test_a_garbled_answer_ends_no_heart_and_is_asked_for_again(
    service: ServiceClient, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.runs.session.HEARTBEAT_S", 0.02)
    for path in ("/session_heartbeat", "/optim_step", "/retrieve_future"):
        stub.faults[path] = [Response(b"no gzip", headers={"content-encoding": "gzip"})]
    run = service.create_lora_training_client("org/tiny")
    run.optim_step(AdamParams()).result(10)
    time.sleep(0.2)
    assert stub.paths().count("/session_heartbeat") > 1
    service.close().result(10)


def test_who_is_closed_while_the_session_is_made_makes_nothing_and_does_not_beat(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it, and its run, would be kept as long as the process lives."""
    monkeypatch.setattr("weft.runs.session.HEARTBEAT_S", 0.02)
    stub.faults["/create_session"] = [status(503)]
    pause = RetryPolicy(first_pause_s=0.2, longest_pause_s=0.2)
    service = ServiceClient(base_url=stub.base_url, api_key="tml-test", retry=pause)
    run = service.create_lora_training_client("org/tiny")
    while "/create_session" not in stub.paths():
        time.sleep(0.01)
    service.close().result(10)
    with pytest.raises(weft.WeftError, match="this ServiceClient is closed"):
        run.result(10)
    time.sleep(0.4)
    assert stub.paths() == ["/client/config", "/create_session"]


def test_no_server() -> None:
    lonely = ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-test", retry=FAST)
    with pytest.raises(weft.APIConnectionError, match=r"127\.0\.0\.1:9"):
        run_of(lonely).result(10)
    with pytest.raises(weft.WeftError, match="WEFT_BASE_URL"):
        ServiceClient()


def test_numpy_and_torch_data(service: ServiceClient, stub: Stub) -> None:
    targets = torch.zeros(4, 6, dtype=torch.int64)
    targets[2, 5] = 3
    sparse = Datum(ModelInput.from_ints([1, 2, 3, 4]), {"target_tokens": targets, "weights": np.ones((4, 6))})
    run_of(service).forward([sparse], "cross_entropy").result(10)
    [asked] = [asked for asked in stub.asked if asked.path == "/forward_backward"]
    assert sparse.loss_fn_inputs["target_tokens"].sparse_col_indices == [5]
    assert decode_train_request(asked.body).data[0].inputs["target_tokens"].tolist() == targets.tolist()
