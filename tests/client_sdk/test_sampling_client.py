"""Samplers against a real HTTP stub."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import CancelledError

import pytest
import weft
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from weft import ModelInput, SamplingParams, ServiceClient

from tests.client_sdk.stub_server import SESSION, Stub, not_yet, status
from tests.waiting import until

PROMPT = ModelInput.from_ints([7, 8, 9])
PARAMS = SamplingParams(max_tokens=3)


def test_samples(service: ServiceClient, stub: Stub) -> None:
    sampler = service.create_sampling_client(base_model="org/tiny")
    response = sampler.sample(PROMPT, 2, PARAMS, include_prompt_logprobs=True).result(10)

    assert [(s.tokens, s.logprobs, s.stop_reason) for s in response.sequences] == [
        ([7, 8, 9], [-1.0] * 3, "length")
    ] * 2
    assert [s.sequence_id for s in response.sequences] == ["q0-0", "q0-1"]
    assert response.prompt_logprobs == [None, -1.0, -1.0]
    assert response.prompt_cache_hit_tokens == 1
    assert sampler.get_base_model() == "org/tiny"
    assert sampler.sampling_session_id == f"{SESSION}:sample:0"
    [asked] = [asked for asked in stub.asked if asked.path == "/asample"]
    assert asked.headers["x-tinker-sampling-backpressure"] == "1"
    assert asked.json["sampling_params"] == {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0}


def test_numbers_start_at_zero_and_rise(service: ServiceClient, stub: Stub) -> None:
    sampler = service.create_sampling_client(base_model="org/tiny")
    for future in [sampler.sample(PROMPT, 1, PARAMS) for _ in range(200)]:
        future.result(10)
    assert sorted(body["seq_id"] for body in stub.bodies("/asample")) == list(range(200))


def test_back_pressure_is_waited_out_with_the_same_number(service: ServiceClient, stub: Stub) -> None:
    stub.faults["/asample"] = [status(429)] * 120  # longer than the retry budget
    service.create_sampling_client(base_model="org/tiny").sample(PROMPT, 1, PARAMS).result(20)
    assert {body["seq_id"] for body in stub.bodies("/asample")} == {0}


def test_a_lost_sample_is_drawn_again_under_a_new_number(service: ServiceClient, stub: Stub) -> None:
    stub.faults["/retrieve_future"] = [status(410)]
    service.create_sampling_client(base_model="org/tiny").sample(PROMPT, 1, PARAMS).result(10)
    assert [body["seq_id"] for body in stub.bodies("/asample")] == [0, 1]


def event(*tokens: int) -> Response:
    """An event of a stream, with these tokens of sample 0."""
    part = {"sample": 0, "start": 0, "tokens": tokens, "logprobs": [-1.0] * len(tokens), "versions": [0] * len(tokens)}
    return Response(f"data: {json.dumps(part)}\n\n", media_type="text/event-stream")


def test_a_lost_sample_whose_tokens_were_read_is_not_drawn_again(service: ServiceClient, stub: Stub) -> None:
    """Without a seed another draw has other tokens: those that were read would not begin the result."""
    stub.faults["/stream_future"] = [event(1, 2)]
    stub.faults["/retrieve_future"] = [not_yet()] * 5 + [status(410)]
    drawing = service.create_sampling_client(base_model="org/tiny").sample(PROMPT, 1, PARAMS, stream=True)
    parts = iter(drawing)
    assert next(parts).tokens == [1, 2]
    with pytest.raises(weft.GoneError):
        next(parts)
    assert len(stub.bodies("/asample")) == 1


def test_a_lost_sample_with_a_seed_is_drawn_again_though_its_tokens_were_read(
    service: ServiceClient, stub: Stub
) -> None:
    stub.faults["/stream_future"] = [event(7, 8)]
    stub.faults["/retrieve_future"] = [not_yet()] * 5 + [status(410)]
    seeded = PARAMS.model_copy(update={"seed": 1})
    drawing = service.create_sampling_client(base_model="org/tiny").sample(PROMPT, 1, seeded, stream=True)
    assert [token for part in drawing for token in part.tokens] == [7, 8, 9]


def test_tokens_that_are_not_the_results_are_never_joined_with_it(service: ServiceClient, stub: Stub) -> None:
    """The run's weights had moved by the time it was drawn again."""
    stub.faults["/stream_future"] = [event(5)]
    stub.faults["/retrieve_future"] = [not_yet()] * 5
    drawing = service.create_sampling_client(base_model="org/tiny").sample(PROMPT, 1, PARAMS, stream=True)
    parts = iter(drawing)
    assert next(parts).tokens == [5]
    with pytest.raises(weft.WeftError, match="drawn anew"):
        next(parts)
    assert drawing.result(10).sequences[0].tokens == [7, 8, 9]


@pytest.mark.parametrize("fault", [status(503), status(429)], ids=["503", "429"])
def test_a_stream_is_asked_for_again_where_what_is_wrong_passes_by_itself(
    service: ServiceClient, stub: Stub, fault: Response, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a server restarts: a user who prunes answers as they are drawn would pay for all of their tokens."""
    monkeypatch.setattr("weft.runs.drawing.READ_AGAIN_S", 0.01)
    stub.faults["/stream_future"] = [fault, event(7)]
    stub.faults["/retrieve_future"] = [not_yet()] * 60
    drawing = service.create_sampling_client(base_model="org/tiny").sample(PROMPT, 1, PARAMS, stream=True)
    assert [part.tokens for part in drawing] == [[7], [8, 9]]


def test_a_stream_that_is_left_open_is_read_on(
    service: ServiceClient, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.runs.drawing.READ_AGAIN_S", 0.01)
    left_open = Response(bytes(event(7).body) + b"event: open\ndata: {}\n\n", media_type="text/event-stream")
    stub.faults["/stream_future"] = [left_open, event(7, 8)]
    stub.faults["/retrieve_future"] = [not_yet()] * 60
    drawing = service.create_sampling_client(base_model="org/tiny").sample(PROMPT, 1, PARAMS, stream=True)
    assert [part.tokens for part in drawing] == [[7], [8], [9]]


def test_a_stream_that_cannot_be_read_is_told(
    service: ServiceClient, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.faults["/stream_future"] = [Response('data: {"sample": 0}\n\n', media_type="text/event-stream")]
    stub.faults["/retrieve_future"] = [not_yet()] * 5
    drawing = service.create_sampling_client(base_model="org/tiny").sample(PROMPT, 1, PARAMS, stream=True)
    assert [token for part in drawing for token in part.tokens] == [7, 8, 9]
    assert "come at its end" in caplog.text


def test_a_failed_sample_is_final(service: ServiceClient, stub: Stub) -> None:
    stub.results["r-x"] = JSONResponse({"error": "prompt too long", "category": "user"})
    stub.replies["POST /asample"] = {"request_id": "r-x", "sample_sequence_ids": ["q"]}
    with pytest.raises(weft.RequestFailedError, match="prompt too long"):
        service.create_sampling_client(base_model="org/tiny").sample(PROMPT, 1, PARAMS).result(10)
    assert len(stub.bodies("/asample")) == 1


def test_cancelling_tells_the_server(service: ServiceClient, stub: Stub) -> None:
    stub.faults["/retrieve_future"] = [not_yet()] * 10_000
    future = service.create_sampling_client(base_model="org/tiny").sample(PROMPT, 1, PARAMS)
    until(lambda: stub.bodies("/retrieve_future"))
    future.cancel()
    with pytest.raises(CancelledError):
        future.result(10)
    until(lambda: stub.bodies("/cancel_future"), 5)
    assert stub.bodies("/cancel_future") == [{"request_id": f"r-{SESSION}:sample:0-0"}]


class Late(JSONResponse):
    """An answer that is on its way until the test lets it arrive."""

    def __init__(self, content: object) -> None:
        super().__init__(content)
        self.may = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.to_thread(self.may.wait, 30)
        await super().__call__(scope, receive, send)


def test_cancelling_what_is_being_sent_ends_it_once_it_is_accepted(service: ServiceClient, stub: Stub) -> None:
    """Otherwise the server would draw it to its end for nobody, and bill it."""
    sampler = service.create_sampling_client(base_model="tiny").result()
    late = Late({"request_id": "accepted"})
    stub.faults["/asample"].append(late)
    future = sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams())
    until(lambda: stub.bodies("/asample"))
    future.cancel()
    late.may.set()
    until(lambda: stub.bodies("/cancel_future"))
    assert stub.bodies("/cancel_future") == [{"request_id": "accepted"}]


def test_what_is_cancelled_before_the_server_has_room_is_not_sent_again(service: ServiceClient, stub: Stub) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result()
    stub.faults["/asample"] += [Response(status_code=429, headers={"retry-after-ms": "50"})] * 9
    future = sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams())
    until(lambda: stub.bodies("/asample"))
    future.cancel()
    asked = 0
    while asked < (asked := len(stub.bodies("/asample"))):  # one may be on its way
        time.sleep(0.3)
    assert asked < 9
    assert not stub.bodies("/cancel_future")


def test_compute_logprobs(service: ServiceClient, stub: Stub) -> None:
    sampler = service.create_sampling_client(model_path="tinker://r:train:0/sampler_weights/a")
    assert sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=2).result(10) == [None, -1.0, -1.0]
    body = stub.bodies("/asample")[0]
    assert body["sampling_params"]["max_tokens"] == 0
    assert body["prompt_logprobs"] is True
    assert body["prompt_logprobs_last_n"] == 2
    stub.replies[f"GET /samplers/{SESSION}:sample:0"] = {"sampler_id": "s", "base_model": "org/found"}
    assert sampler.get_base_model() == "org/found"


def test_a_sampler_of_a_run_shares_the_sampler_numbers(service: ServiceClient, stub: Stub) -> None:
    first = service.create_sampling_client(base_model="org/tiny").result(10)
    training = service.create_lora_training_client("org/tiny")
    second = training.save_weights_and_get_sampling_client(kind="inflight")
    second.sample(PROMPT, 1, PARAMS).result(10)

    assert (first.sampling_session_id, second.sampling_session_id) == (f"{SESSION}:sample:0", f"{SESSION}:sample:1")
    assert second.get_base_model() == "org/tiny"
    assert stub.bodies("/save_weights_for_sampler") == [
        {
            "model_id": f"{SESSION}:train:0",
            "sampling_session_seq_id": 1,
            "kind": "inflight",
            "seq_id": 1,
            "type": "save_weights_for_sampler",
        }
    ]


def test_bad_parameters_are_refused_before_anything_is_sent(service: ServiceClient, stub: Stub) -> None:
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"max_token\n.*not permitted"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="base_model"):
        service.create_sampling_client()
    assert stub.asked == []
