"""Samplers in other processes, and one poll for all requests of a sampler."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from typing import Any, cast

import httpx
import pytest
import weft
from starlette.responses import JSONResponse, Response
from weft import ModelInput, RetryPolicy, SamplingClient, SamplingParams, ServiceClient
from weft.runs.sampler import CLONE_STRIDE
from weft.transport.completions import CompletionPoll
from weft.transport.http import Call

from tests.client_sdk.conftest import FAST
from tests.client_sdk.stub_server import SESSION, Asked, Stub, status

PROMPT = ModelInput.from_ints([7, 8])
PARAMS = SamplingParams(max_tokens=2)


def draw(sampler: SamplingClient) -> list[int]:
    return sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens


def seqs(stub: Stub) -> list[int]:
    return [body["seq_id"] for body in stub.bodies("/asample")]


def test_a_handle_carries_no_key(service: ServiceClient, stub: Stub) -> None:
    sampler = service.create_sampling_client(base_model="org/tiny", record_stability_info=True)
    handle = sampler.get_sampler_handle()
    other = SamplingClient.from_sampler_handle(handle, api_key="tml-other")
    assert draw(other) == draw(sampler) == [7, 8]
    theirs, ours = stub.bodies("/asample")
    assert theirs["sampling_session_id"] == ours["sampling_session_id"] == f"{SESSION}:sample:0"
    assert theirs["seq_id"] >= CLONE_STRIDE
    assert ours["seq_id"] == 0
    assert theirs["record_stability_info"] is ours["record_stability_info"] is True
    assert "tml-test" not in handle
    assert [asked.headers["x-api-key"] for asked in stub.asked if asked.path == "/asample"] == ["tml-other", "tml-test"]
    assert stub.paths().count("/create_session") == 1
    assert other.get_base_model() == "org/tiny"


def test_a_handle_needs_a_key_and_must_be_one(service: ServiceClient) -> None:
    handle = service.create_sampling_client(base_model="org/tiny").get_sampler_handle()
    with pytest.raises(weft.WeftError, match="WEFT_API_KEY"):
        SamplingClient.from_sampler_handle(handle)
    for broken in ("", "####", "e30="):
        with pytest.raises(weft.WeftError, match="handle"):
            SamplingClient.from_sampler_handle(broken)


def test_pickled(service: ServiceClient, stub: Stub) -> None:
    sampler = service.create_sampling_client(base_model="org/tiny")
    clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(3)]  # noqa: S301
    assert [draw(clone) for clone in clones] == [[7, 8]] * 3
    assert len({seq // CLONE_STRIDE for seq in seqs(stub)}) == 3
    assert {asked.headers["x-api-key"] for asked in stub.asked} == {"tml-test"}


def test_all_that_a_process_is_handed_of_a_session_is_there_once_and_as_the_first(stub: Stub) -> None:
    """A pool of processes unpickles a client with each task: each client had a heartbeat of its own, for ever."""
    headers = {"X-Gate": "open"}
    there = ServiceClient(
        base_url=stub.base_url, api_key="tml-test", retry=FAST, priority="batch", default_headers_overrides=headers
    )
    clones = [pickle.loads(pickle.dumps(there.create_sampling_client(base_model="org/tiny"))) for _ in range(3)]  # noqa: S301
    assert [draw(clone) for clone in clones] == [[7, 8]] * 3
    assert stub.paths().count("/client/config") == 2  # ours and theirs
    assert {(asked.headers["x-weft-priority"], asked.headers["x-gate"]) for asked in stub.asked} == {("batch", "open")}
    assert {clone._session.transport.policy.budget_s for clone in clones} == {FAST.budget_s}


def test_a_process_that_is_handed_a_client_has_its_own_random_pauses() -> None:
    ours, theirs = (pickle.loads(pickle.dumps(RetryPolicy())) for _ in range(2))  # noqa: S301
    assert ours == theirs
    assert ours.jitter() != theirs.jitter()


def test_clones_are_numbered_by_the_server_if_it_can(service: ServiceClient, stub: Stub) -> None:
    stub.config = {"sample_join_sampling_session": True}
    stub.replies["POST /join_sampling_session"] = {"client_counter": 5, "type": "join_sampling_session"}
    clone = pickle.loads(pickle.dumps(service.create_sampling_client(base_model="org/tiny")))  # noqa: S301
    draw(clone)
    draw(clone)
    assert seqs(stub) == [5 * CLONE_STRIDE, 5 * CLONE_STRIDE + 1]
    assert stub.bodies("/join_sampling_session")[0]["sampling_session_id"] == f"{SESSION}:sample:0"


class Board:
    """The stub's side of retrieve_futures: a log of completions; a poll is held until there is something new."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.acknowledged: list[str] = []
        self.rounds = 0

    def __call__(self, asked: Asked) -> Response:
        self.rounds += 1
        body: dict[str, Any] = asked.json
        self.acknowledged += body["retrieved_request_ids"]
        done = [id_ for (lane, _), id_ in self.stub.submitted.items() if ":sample:" in lane]
        new = done[body["prev_cursor"] :]
        if not new:
            time.sleep(0.02)
        completions = [{"state": "finished", "request_id": id_} for id_ in new]
        return JSONResponse({"completions": completions, "cursor": len(done)})


@pytest.fixture
def board(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Board:
    stub.config = {"sample_use_retrieve_futures": True}
    board = Board(stub)
    monkeypatch.setattr(stub, "on_retrieve_futures", board, raising=False)
    return board


def test_one_poll_for_all(service: ServiceClient, stub: Stub, board: Board) -> None:
    stub.faults["/retrieve_futures"] = [status(503), status(408)]
    sampler = service.create_sampling_client(base_model="org/tiny")
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)]
    assert [future.result(10).sequences[0].tokens for future in futures] == [[7, 8]] * 20
    assert stub.paths().count("/retrieve_future") == 20
    draw(sampler)
    assert len(board.acknowledged) == 20
    target = stub.bodies("/retrieve_futures")[0]["target"]
    expected = {"type": "sampling_session", "sampling_session_id": f"{SESSION}:sample:0", "cloned_sampler_id": 0}
    assert target == expected


def test_a_poll_goes_on_behind_what_it_was_told_also_of_what_was_not_answered_yet() -> None:
    """A request can complete before its own acceptance has been answered."""
    asked: list[dict[str, Any]] = []
    answers = [(["later"], 5), ([], 5), (["first"], 6)]

    class Server:
        poll_policy = FAST

        async def once(self, call: Call) -> httpx.Response:
            asked.append(json.loads(call.body or b""))
            names, cursor = answers[len(asked) - 1]
            told = {"completions": [{"state": "finished", "request_id": name} for name in names], "cursor": cursor}
            return httpx.Response(200, json=told, request=httpx.Request("POST", "http://server"))

    async def story() -> None:
        poll = CompletionPoll(cast(Any, Server()), "s", 3)
        await poll.wait("first")
        await poll.wait("later")

    asyncio.run(asyncio.wait_for(story(), 30))
    assert [one["prev_cursor"] for one in asked] == [0, 5, 5]
    assert {one["target"]["cloned_sampler_id"] for one in asked} == {3}


def test_a_refused_poll_fails_all_who_wait(service: ServiceClient, stub: Stub, board: Board) -> None:
    stub.faults["/retrieve_futures"] = [status(404, "no such sampler")]
    sampler = service.create_sampling_client(base_model="org/tiny")
    with pytest.raises(weft.NotFoundError, match="no such sampler"):
        draw(sampler)
    assert draw(sampler) == [7, 8]


def test_nothing_is_polled_when_nobody_waits(service: ServiceClient, stub: Stub, board: Board) -> None:
    sampler = service.create_sampling_client(base_model="org/tiny")
    draw(sampler)
    time.sleep(0.1)
    rounds = board.rounds
    time.sleep(0.1)
    assert board.rounds == rounds
