from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from starlette.types import Message
from weft.wire import TensorData
from weft.wire.binary.sample_codec import SequenceResult, encode_sample_response

from api.state.large_bodies import LargeBodies
from scheduler.journal.ending.outcomes import LARGE_BYTES
from tests.api.conftest import World
from tests.api.data import batch
from tests.api.test_sampling import sample, sampler
from tests.waiting import until

PROTOBUF = "application/x-protobuf"


@pytest.fixture
def world(world: World) -> World:
    limits = world.service.settings.limits.model_copy(update={"inline_result_bytes": 100})
    object.__setattr__(world.service, "settings", world.service.settings.model_copy(update={"limits": limits}))
    return world


def retrieve(world: World, request_id: str, **options: Any) -> Any:
    return world.call("POST", "retrieve_future", json={"request_id": request_id, **options})


def finished(world: World, payload: bytes) -> str:
    run = world.run()
    request_id = str(world.train(batch(run, 1))["request_id"])
    world.finish(request_id, payload, tokens=1)
    return request_id


@pytest.mark.parametrize(
    ("size", "options", "announced"),
    [
        (100, {"allow_metadata_only": True}, False),
        (101, {"allow_metadata_only": True}, True),
        (101, {"allow_metadata_only": False}, False),
        (101, {}, False),
    ],
)
def test_large_results_are_announced_to_who_allows_it(
    world: World, size: int, options: dict[str, Any], announced: bool
) -> None:
    request_id = finished(world, b"x" * size)
    for _ in range(2):  # an answer may be lost, so it can be asked for again
        reply = retrieve(world, request_id, **options)
        assert reply.status_code == 200
        if announced:
            assert reply.json() == {"status": "complete_metadata", "response_payload_size": size}
        else:
            assert (reply.content, reply.headers["content-type"]) == (b"x" * size, PROTOBUF)
    assert retrieve(world, request_id, allow_metadata_only=False).content == b"x" * size


def test_a_client_that_reads_json_alone_is_told_all_that_it_asked_for(world: World) -> None:
    request_id = str(world.post("asample", sample(sampler(world, world.session()), 0))["request_id"])
    logprobs = np.array([-0.5, -1.5], np.float32)
    routes = np.arange(6).reshape(3, 1, 2)
    drawn = SequenceResult(np.array([3, 4], np.int32), logprobs, "length", stale=True, routed_experts=routes)
    targets = TensorData([-0.25, 0.0], "float32", [1, 2])
    alternatives = np.array([[5], [6]]), np.array([[-1.0], [-2.0]], np.float32)
    payload = encode_sample_response(
        [drawn], np.array([np.nan, -2.0], np.float32), 1, target_prompt_logprobs=targets, prompt_alt_tokens=alternatives
    )
    world.finish(request_id, payload, sample=2)
    body = {"request_id": request_id}
    told = world.call("POST", "retrieve_future", json=body, headers={"accept": "application/json"}).json()
    assert told == {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "length",
                "tokens": [3, 4],
                "logprobs": [-0.5, -1.5],
                "stale": True,
                "routed_experts": routes.tolist(),
            }
        ],
        "prompt_cache_hit_tokens": 1,
        "prompt_logprobs": [None, -2.0],
        "target_prompt_logprobs": {"data": [-0.25, 0.0], "dtype": "float32", "shape": [1, 2]},
        "prompt_alt_tokens": {
            "tokens": {"data": [5, 6], "dtype": "int64", "shape": [2, 1]},
            "logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2, 1]},
        },
    }


def test_a_stream_that_a_stopping_server_ends_can_be_asked_for_again(world: World) -> None:
    """The sample is kept, and goes on being drawn after the restart."""
    asked = sample(sampler(world, world.session()), 0) | {"stream": True}
    request_id = world.post("asample", asked)["request_id"]
    world.service.polls.release()
    assert world.call("POST", "stream_future", json={"request_id": request_id}).text == "event: open\ndata: {}\n\n"


def test_a_sample_is_streamed_to_few_at_a_time(world: World) -> None:
    """Each is told every token: a thousand readers of one sample would keep the server from everything else."""
    asked = sample(sampler(world, world.session()), 0) | {"stream": True}
    body = {"request_id": world.post("asample", asked)["request_id"], "timeout": 2}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(world.call, "POST", "stream_future", json=body) for _ in range(4)]
        until(lambda: world.service.readers.total() == 4)
        beyond = [world.call("POST", "stream_future", json=body).status_code for _ in range(2)]
        statuses = [each.result().status_code for each in answers]
    assert (statuses, beyond, world.service.readers) == ([200] * 4, [429] * 2, {})
    assert world.call("POST", "stream_future", json=body | {"timeout": 0}).status_code == 200


def test_a_waiting_operation_is_408_with_its_state(world: World) -> None:
    run = world.run()
    request_id = world.train(batch(run, 2))["request_id"]
    reply = retrieve(world, request_id, allow_metadata_only=True)
    assert reply.status_code == 408
    assert reply.json() == {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": "active",
        "queue_state_reason": "waiting for operation 1 of this run, which has not arrived",
    }


def test_large_results_are_read_one_by_one_as_their_clients_take_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is in memory only while it is answered. Small ones, and other organisations, do not wait for it."""
    object.__setattr__(world.service, "large_results", LargeBodies(2 * LARGE_BYTES, wait_s=0.3, what="results"))
    large, small = finished(world, bytes(2 * LARGE_BYTES)), finished(world, bytes(LARGE_BYTES))
    world.service.journal.answers.clear()
    get, read = world.service.blobs.get, list[str]()
    monkeypatch.setattr(world.service.blobs, "get", lambda ref: (read.append(ref), get(ref))[1])
    portal: Any = world.http.portal
    taken = portal.call(asyncio.Event)
    slow = portal.start_task_soon(take, world, large, taken)
    while not read:
        time.sleep(0.01)
    refused = retrieve(world, large)
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
    assert f"{2 * LARGE_BYTES} bytes; fetch fewer" in refused.json()["detail"]
    assert retrieve(world, small).content == bytes(LARGE_BYTES)
    assert world.outcome(large, key=world.other_key).status_code == 404
    assert len(read) == 2
    portal.call(taken.set)
    assert slow.result() == 2 * LARGE_BYTES
    assert retrieve(world, large).content == bytes(2 * LARGE_BYTES)


async def take(world: World, request_id: str, taken: asyncio.Event) -> int:
    """Fetch a result like a client that reads most of it once `taken` is set; returns how much it read."""
    body, size = json.dumps({"request_id": request_id}).encode(), 0
    headers = [(b"x-api-key", world.key.encode()), (b"accept", PROTOBUF.encode())]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/retrieve_future", "headers": headers}
    scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "app": world.http.app}

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        nonlocal size
        if size:
            await taken.wait()
        size += len(message.get("body", b""))

    await world.http.app(scope, receive, send)
    return size


def test_a_result_that_is_no_longer_kept_is_410(world: World) -> None:
    request_id = finished(world, b"x" * 2000)
    world.service.journal.answers.clear()
    world.service.blobs.delete(world.operation(request_id).result_ref or "")
    reply = retrieve(world, request_id)
    assert reply.status_code == 410
    assert (reply.json()["code"], reply.json()["request_id"]) == ("gone", request_id)


@pytest.mark.parametrize("request_id", ["unknown", "", "\0", "x" * 300, "é"])
def test_unknown_operations_are_404(world: World, request_id: str) -> None:
    assert retrieve(world, request_id).status_code == 404


def test_foreign_operations_are_404(world: World) -> None:
    request_id = finished(world, b"x")
    assert world.outcome(request_id, key=world.other_key).status_code == 404
    world.service.journal.answers.clear()
    assert world.outcome(request_id, key=world.other_key).status_code == 404
