"""Samples on a real server that are read while they are drawn, and stopped early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
import weft
from weft.types import ModelInput, SamplingParams

from tests.e2e.conftest import BASE_MODEL, Weftd

pytestmark = pytest.mark.server

PROMPT = ModelInput.from_ints(list(range(40, 90)))
LONG = SamplingParams(max_tokens=1900, stop=[], seed=3)


@pytest.fixture(scope="module")
def service(weftd: Weftd) -> Iterator[weft.ServiceClient]:
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("streams")) as client:
        yield client


@pytest.fixture(scope="module")
def sampler(service: weft.ServiceClient) -> weft.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL).result()


def billed(service: weft.ServiceClient) -> dict[str, int]:
    return {row.kind: row.tokens for row in service.create_rest_client().get_usage().result().rows}


def test_the_parts_are_the_result(sampler: weft.SamplingClient) -> None:
    params = SamplingParams(max_tokens=300, stop=[], seed=1)
    future = sampler.sample(PROMPT, 3, params, topk_sample_logprobs=2, stream=True)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    logprobs: dict[int, list[float]] = {0: [], 1: [], 2: []}
    tops: dict[int, list[object]] = {0: [], 1: [], 2: []}
    early = 0
    for part in future:
        early += not future.done()
        assert part.start == len(tokens[part.sample])
        assert part.versions == [0] * len(part.tokens)
        tokens[part.sample] += part.tokens
        logprobs[part.sample] += part.logprobs
        tops[part.sample] += part.tops
    assert early > 3  # while it was drawn
    result = future.result()
    for index, sequence in enumerate(result.sequences):
        assert tokens[index] == sequence.tokens
        assert logprobs[index] == pytest.approx(sequence.logprobs, abs=1e-6)
        assert [ids for ids, _ in tops[index]] == [[t for t, _ in row] for row in sequence.topk_logprobs]  # type: ignore
    assert sampler.sample(PROMPT, 3, params).result().sequences[1].tokens == tokens[1]


def test_without_stream_the_parts_come_at_the_end(sampler: weft.SamplingClient) -> None:
    future = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=5, stop=[], seed=1))
    parts = list(future)
    assert [part.tokens for part in parts] == [future.result().sequences[0].tokens]


def test_stop_returns_what_there_is_and_what_it_costs(
    service: weft.ServiceClient, sampler: weft.SamplingClient
) -> None:
    before = billed(service)
    future = sampler.sample(PROMPT, 1, LONG, stream=True)
    seen: list[int] = []
    for part in future:
        seen += part.tokens
        if len(seen) >= 20:
            break
    result = future.stop(30)
    (sequence,) = result.sequences
    assert sequence.tokens[: len(seen)] == seen
    assert len(seen) <= len(sequence.tokens) < 1900
    assert len(sequence.logprobs or []) == len(sequence.tokens)
    assert sum(span.length for span in sequence.policy_versions) == len(sequence.tokens)
    assert result.usage is not None
    assert result.usage.sample == len(sequence.tokens)
    assert result.usage.prefill + result.usage.cached_prefill == 50
    after = billed(service)
    for kind in ("prefill", "cached_prefill", "sample"):
        assert after.get(kind, 0) - before.get(kind, 0) == getattr(result.usage, kind)
    again = sampler.sample(
        ModelInput.from_ints([*PROMPT.to_ints(), *sequence.tokens]), 1, SamplingParams(max_tokens=30, stop=[], seed=3)
    ).result()
    whole = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=len(sequence.tokens) + 30, stop=[], seed=3)).result()
    assert sequence.tokens + again.sequences[0].tokens == whole.sequences[0].tokens


def test_stop_of_one_that_has_ended_changes_nothing(sampler: weft.SamplingClient) -> None:
    future = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=3, stop=[]))
    tokens = future.result().sequences[0].tokens
    assert future.stop(30).sequences[0].tokens == tokens


def test_the_same_in_an_event_loop(sampler: weft.SamplingClient) -> None:
    async def go() -> None:
        future = sampler.sample(PROMPT, 2, LONG, stream=True)
        async for part in future:
            assert part.tokens
            break
        result = await future.stop_async(30)
        assert all(len(sequence.tokens) < 1900 for sequence in result.sequences)

    asyncio.run(go())


def test_events_as_curl_sees_them(weftd: Weftd, sampler: weft.SamplingClient) -> None:
    http = httpx.Client(
        base_url=weftd.url + "/api/v1", headers={"X-API-Key": weftd.key("streams")}, timeout=httpx.Timeout(30)
    )
    body = {
        "sampling_session_id": sampler.sampling_session_id,
        "seq_id": 10**17,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT.to_ints()}]},
        "sampling_params": {"max_tokens": 40, "stop": []},
        "stream": True,
    }
    asked = http.post("/asample", json=body).json()["request_id"]
    assert http.post("/asample", json=body).json()["request_id"] == asked  # although the server chose the seed
    for _ in range(2):  # while it is drawn, and afterwards
        with http.stream("POST", "/stream_future", json={"request_id": asked}) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            events = [event.split("\n") for event in "".join(reply.iter_text()).split("\n\n") if event]
        assert events[-1] == ["event: done", "data: {}"]
        parts = [json.loads(lines[0].removeprefix("data: ")) for lines in events[:-1]]
        assert sum(len(part["tokens"]) for part in parts) == 40
    with http.stream("POST", "/stream_future", json={"request_id": "nobody's"}) as reply:
        assert reply.status_code == 404
