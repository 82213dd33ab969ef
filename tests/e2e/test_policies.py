"""Samples that follow a run as it trains: their versions and staleness, and cancelling them for what was drawn."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator

import httpx
import pytest
import weft
from weft import AdamParams, ServiceClient
from weft.types import Datum, ModelInput, SamplingParams
from weft.wire.binary.sample_codec import SampleResult, decode_sample_response

from tests.e2e.conftest import BASE_MODEL, Weftd

pytestmark = pytest.mark.server
PROMPT = ModelInput.from_ints([40, 43, 46, 49])
#: Takes longer than a few training steps on any machine.
LONG = SamplingParams(max_tokens=1900, stop=[], seed=1)
GROUP = 4


@pytest.fixture
def service(weftd: Weftd) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=weftd.url, api_key=weftd.key("inflight")) as service:
        yield service


def step(run: weft.TrainingClient) -> None:
    datum = Datum(ModelInput.from_ints([40, 41, 42]), {"target_tokens": [41, 42, 43], "weights": [1.0, 1.0, 1.0]})
    backward, update = run.forward_backward([datum], "cross_entropy"), run.optim_step(AdamParams(learning_rate=1e-3))
    backward.result(60)
    update.result(60)


def test_inflight_samples_follow_their_run_while_they_are_drawn(service: ServiceClient) -> None:
    run = service.create_lora_training_client(BASE_MODEL, rank=4)
    step(run)
    first = run.save_weights_and_get_sampling_client(kind="inflight")
    snapshot = run.save_weights_and_get_sampling_client()
    drawn = first.sample(PROMPT, GROUP, LONG, stream=True)
    kept = snapshot.sample(PROMPT, 1, LONG, stream=True)
    first.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result(60)  # by then the other samples are being drawn, too
    step(run)
    run.save_weights_and_get_sampling_client(kind="inflight").result(60)
    moved = set()
    for part in drawn:
        moved |= {part.sample} if 2 in part.versions else set()
        if len(moved) == GROUP:
            break
    ended = drawn.stop(60).sequences
    for sequence in ended:
        assert [span.version for span in sequence.policy_versions] == [1, 2]
        assert sum(span.length for span in sequence.policy_versions) == len(sequence.tokens)
    for part in kept:  # it may have begun later
        if part.start + len(part.tokens) > min(sequence.policy_versions[0].length for sequence in ended):
            break
    (unmoved,) = kept.stop(60).sequences
    assert [(span.version, span.length) for span in unmoved.policy_versions] == [(1, len(unmoved.tokens))]


def test_the_server_ends_what_is_too_old(service: ServiceClient, weftd: Weftd) -> None:
    run = service.create_lora_training_client(BASE_MODEL, rank=4)
    sampler = run.save_weights_and_get_sampling_client().result(60)
    strict = sampler.sample(PROMPT, GROUP, LONG, max_staleness=0)
    sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result(60)
    before = sampled(weftd)
    step(run)
    sequences = strict.result(60).sequences
    assert all(sequence.stale and sequence.stop_reason == "length" for sequence in sequences)
    lengths = [len(sequence.tokens) for sequence in sequences]
    assert 0 < sum(lengths) < GROUP * 1900
    assert sampled(weftd) - before == sum(lengths)
    fresh = run.save_weights_and_get_sampling_client().result(60)
    (one,) = fresh.sample(PROMPT, 1, SamplingParams(max_tokens=3, stop=[]), max_staleness=0).result(60).sequences
    assert (one.stale, len(one.tokens), one.policy_versions[0].version) == (False, 3, 1)
    base = service.create_sampling_client(base_model=BASE_MODEL)
    with pytest.raises(weft.BadRequestError, match="max_staleness"):
        base.sample(PROMPT, 1, LONG, max_staleness=1).result(60)


def test_cancelling_returns_what_there_is_and_bills_exactly_that(service: ServiceClient, weftd: Weftd) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result(60)
    before = sampled(weftd)
    http = httpx.Client(base_url=f"{weftd.url}/api/v1", headers={"X-API-Key": weftd.key("inflight")}, timeout=60)
    body = {
        "sampling_session_id": sampler.sampling_session_id,
        "seq_id": 77,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [40, 43, 46, 49]}]},
        "sampling_params": {"max_tokens": 1900, "stop": [], "seed": 1},
        "num_samples": GROUP,
    }
    request_id = http.post("/asample", json=body).raise_for_status().json()["request_id"]
    sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result(60)
    http.post("/cancel_future", json={"request_id": request_id}).raise_for_status()
    partial = result(http, request_id)
    lengths = [sequence.tokens.size for sequence in partial.sequences]
    assert 0 < sum(lengths) < GROUP * 1900
    assert sampled(weftd) - before == sum(lengths) + 1
    params = SamplingParams(max_tokens=max(lengths), stop=[], seed=1)
    whole = sampler.sample(PROMPT, 1, params).result(120).sequences[0].tokens
    assert partial.sequences[0].tokens.tolist() == whole[: lengths[0]]


def result(http: httpx.Client, request_id: str) -> SampleResult:
    headers = {"Accept": "application/x-protobuf"}
    for _ in range(20):
        answer = http.post("/retrieve_future", json={"request_id": request_id}, headers=headers).raise_for_status()
        if answer.headers["content-type"].startswith("application/x-protobuf"):
            return decode_sample_response(answer.content)
        time.sleep(0.1)
    raise AssertionError(answer.text)


def sampled(server: Weftd) -> int:
    """How many tokens were billed as sampled."""
    with sqlite3.connect(server.data_dir / "weft.db") as database:
        query = (
            "SELECT COALESCE(SUM(quantity), 0) FROM usage_events JOIN organisations o ON o.id = org_id "
            "WHERE o.name = 'inflight' AND usage_events.kind = 'sample'"
        )
        return int(database.execute(query).fetchone()[0])
