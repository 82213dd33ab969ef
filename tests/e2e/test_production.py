"""Several API replicas and workers share a database, a queue and an object store, but no folder. Whatever is accepted
anywhere finishes, once, whoever is killed and whatever fails. One of the two trainers has two ranks."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import weft
from tinker import types

from tests.e2e.conftest import BASE_MODEL
from tests.e2e.data import ADAM, prompt, supervised
from tests.e2e.production import Production, production_of, stop
from tests.e2e.test_crashes import fingerprint
from tests.servers import OwnRedis, OwnStore, PostgresServer
from tests.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
STEPS = 5
#: How long the object store is away.
AWAY_S = 10.0
PARAMS = types.SamplingParams(max_tokens=40, seed=1, stop=[])
#: No wait here takes that long, on any machine.
PATIENCE_S = 240


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[OwnStore]:
    own = OwnStore(tmp_path / "objects")
    yield own
    own.stop()


@pytest.fixture
def production(
    tmp_path: Path, postgres: PostgresServer, migrated_postgres: str, own_redis: OwnRedis, own_store: OwnStore
) -> Iterator[Production]:
    with production_of(tmp_path, postgres, migrated_postgres, own_redis.url, own_store) as made:
        yield made


def test_nothing_is_lost_or_billed_twice_whoever_is_killed(
    production: Production, own_redis: OwnRedis, own_store: OwnStore
) -> None:
    trainer, generators = production.worker("trainer"), [production.worker("generator") for _ in range(2)]
    replicas = production.serve(2)
    leader = production.leader(replicas)
    (other,) = replicas.keys() - {leader}
    key = production.key()
    # The client stays with a replica that is never killed; the leader is another one.
    service = tinker.ServiceClient(base_url=other, api_key=key)
    there = tinker.ServiceClient(base_url=leader, api_key=key)

    calm = there.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result(timeout=PATIENCE_S)
    expected = train(calm), fingerprint(calm)
    careless = no_step_is_taken_without_its_gradient(service)
    standby = production.ranks()
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    drawn = sampled(sampler)
    assert sampled(there.create_sampling_client(base_model=BASE_MODEL).result()) == drawn

    shaken = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result(timeout=PATIENCE_S)
    futures = [sampler.sample(prompt(), 2, PARAMS) for _ in range(6)]
    generators[0].kill()

    def disturb(step: int) -> None:
        if step == 1:
            trainer.kill()
        elif step == 2:
            without_redis(own_redis, other, key)
        elif step == 3:
            replicas[leader].kill()
        elif step == 4:
            futures.extend(sampler.sample(prompt(), 2, PARAMS) for _ in range(4))
            without_store(own_store, other, key)

    found = train(shaken, disturb), fingerprint(shaken)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    for future in futures:
        assert tokens_of(future) == drawn
    assert production.leader([other]) == other
    assert standby.poll() is None
    path = shaken.save_state("here").result(timeout=PATIENCE_S).path
    downloaded_from_the_store(other, key, path, own_store)
    resumed = service.create_training_client_from_state_with_optimizer(path)
    np.testing.assert_array_equal(fingerprint(resumed), found[1])
    assert not list(production.folder.glob("data*/blobs"))
    inflight_samples_follow_their_run(other, key)
    a_stream_is_read_while_it_is_drawn(other, key)
    until(lambda: production.query("select count(*) from operations where state = 'queued'") == [(0,)], PATIENCE_S)
    failed = production.query("select kind, error from operations where state = 'failed' and lane <> %s", careless)
    doubled = production.query(
        "select operation_id, kind, count(*) from usage_events where operation_id is not null "
        "group by operation_id, kind having count(*) > 1"
    )
    (trained,) = production.query(
        "select count(*) from operations where kind = 'forward_backward' and lane <> %s", careless
    )[0]
    (billed,) = production.query(
        "select count(distinct operation_id) from usage_events where kind = 'train' and run_id <> %s", careless
    )[0]
    assert (failed, doubled) == ([], [])
    assert trained == billed
    assert [stop(worker, PATIENCE_S) for worker in (standby, generators[1])] == [0, 0], production.log()
    assert stop(replicas[other], PATIENCE_S) == 0, production.log()


def train(run: Any, disturb: Callable[[int], None] = lambda step: None) -> list[float]:
    found = []
    for step in range(STEPS):
        disturb(step)
        backward, update = run.forward_backward(supervised(seed=step), "cross_entropy"), run.optim_step(ADAM)
        found.append(backward.result(timeout=PATIENCE_S).metrics["loss:sum"])
        update.result(timeout=PATIENCE_S)
    return found


def no_step_is_taken_without_its_gradient(service: tinker.ServiceClient) -> str:
    """A replica that does not lead refuses data (the leader must hear of it), or a gradient overflows. A microbatch
    sent behind it changes nothing; a client that was told, and sends another, goes on. Returns the run."""
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result(timeout=PATIENCE_S)

    def backward(data: list[types.Datum]) -> Any:
        return run.forward_backward(data, "cross_entropy")

    for token, weight in ((10_000_000, 1.0), (52, 3.4e38)):
        inputs = {"target_tokens": [token], "weights": [weight]}
        bad = [types.Datum(model_input=types.ModelInput.from_ints([50]), loss_fn_inputs=inputs)]  # type: ignore[arg-type]
        before = fingerprint(run)
        refused, behind, step = backward(bad), backward(supervised(seed=0)), run.optim_step(ADAM)
        with pytest.raises(tinker.RequestFailedError, match=r"dat(um|a) 0"):
            refused.result(timeout=PATIENCE_S)
        behind.result(timeout=PATIENCE_S)
        with pytest.raises(tinker.RequestFailedError, match="its gradient is missing"):
            step.result(timeout=PATIENCE_S)
        np.testing.assert_array_equal(fingerprint(run), before)
        with pytest.raises(tinker.RequestFailedError, match=r"dat(um|a) 0"):
            backward(bad).result(timeout=PATIENCE_S)
        backward(supervised(seed=1)).result(timeout=PATIENCE_S)
        run.optim_step(ADAM).result(timeout=PATIENCE_S)
        assert not np.array_equal(fingerprint(run), before)
    return str(run.model_id)


def sampled(client: Any) -> list[list[int]]:
    return tokens_of(client.sample(prompt(), 2, PARAMS))


def tokens_of(future: Any) -> list[list[int]]:
    return [sequence.tokens for sequence in future.result(timeout=PATIENCE_S).sequences]


def sample_request(http: httpx.Client) -> dict[str, Any]:
    session = http.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    return {
        "sampling_session_id": http.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"],
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [40, 43, 46]}]},
        "num_samples": 1,
        "sampling_params": {"max_tokens": 4},
    }


def without_redis(own_redis: OwnRedis, url: str, key: str) -> None:
    """While Redis is away nothing new is accepted, but results can be had; then it comes back, empty."""
    http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60)
    request = sample_request(http)
    accepted = http.post("/api/v1/asample", json=request).json()["request_id"]
    assert retrieved(http, accepted).status_code == 200
    own_redis.stop()
    seqs = iter(range(1, 10**6))
    until(lambda: http.post("/api/v1/asample", json=request | {"seq_id": next(seqs)}).status_code == 503, PATIENCE_S)
    assert "retry-after" in http.post("/api/v1/asample", json=request | {"seq_id": next(seqs)}).headers
    assert retrieved(http, accepted).status_code == 200
    assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200
    own_redis.start()


def without_store(own_store: OwnStore, url: str, key: str) -> None:
    """While the store is away no work that needs it is accepted; it comes back whole as the caller goes on."""
    http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60)
    request = sample_request(http)
    long = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [40, 43, 46] * 150}]}}
    own_store.stop()
    threading.Timer(AWAY_S, own_store.start).start()
    assert "request_id" in http.post("/api/v1/asample", json=request).json()  # small results are in the database
    refused = http.post("/api/v1/asample", json=request | long | {"seq_id": 1})
    assert (refused.status_code, refused.json()["code"]) == (503, "cannot_store"), refused.text
    assert "object store does not answer (Unreachable)" in refused.json()["detail"]
    assert "retry-after" in refused.headers
    assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200


def downloaded_from_the_store(url: str, key: str, path: str, own_store: OwnStore) -> None:
    """Follow our signed link to one that the store has signed; neither needs a key, and both expire."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    archive = f"{url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
    assert httpx.get(archive).status_code == 401
    link = httpx.get(archive, headers={"X-API-Key": key}, timeout=60).headers["location"]
    sent_on = httpx.get(link)
    assert sent_on.status_code == 302
    assert sent_on.headers["location"].startswith(own_store.environment["AWS_ENDPOINT_URL"])
    assert "X-Amz-Expires=120" in sent_on.headers["location"]
    with tarfile.open(fileobj=io.BytesIO(httpx.get(link, follow_redirects=True).content)) as tar:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(tar.getnames())


def inflight_samples_follow_their_run(url: str, key: str) -> None:
    """Samples follow their run; those whose clients want them fresh end once the run has moved on."""
    long = weft.types.SamplingParams(max_tokens=1000, stop=[], seed=1)
    start = weft.types.ModelInput.from_ints([40, 43, 46, 49])
    with weft.ServiceClient(base_url=url, api_key=key) as service:
        run = service.create_lora_training_client(BASE_MODEL, rank=4)
        sampler = run.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE_S)
        drawn, strict = sampler.sample(start, 1, long), sampler.sample(start, 1, long, max_staleness=0)
        while not (drawn.done() and strict.done()):
            run.optim_step(weft.AdamParams(learning_rate=1e-3)).result(PATIENCE_S)
            run.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE_S)
        (found,), (stale,) = drawn.result(PATIENCE_S).sequences, strict.result(PATIENCE_S).sequences
    versions = [span.version for span in found.policy_versions]
    assert len(versions) > 1
    assert versions == sorted(set(versions))
    assert sum(span.length for span in found.policy_versions) == 1000
    assert stale.stale
    assert len(stale.tokens) < 1000


def a_stream_is_read_while_it_is_drawn(url: str, key: str) -> None:
    """By our client and by OpenAI's, though another process draws; it ends where its reader stops it."""
    start = weft.types.ModelInput.from_ints([40, 43, 46, 49])
    with weft.ServiceClient(base_url=url, api_key=key) as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result(PATIENCE_S)
        params = weft.types.SamplingParams(max_tokens=400, stop=[], seed=20)  # the model draws 152 tokens before an EOS
        whole = sampler.sample(start, 1, params, stream=True)
        early, seen = 0, list[int]()
        for part in whole:
            early += not whole.done()
            seen += part.tokens
        assert early > 3
        assert seen == whole.result(PATIENCE_S).sequences[0].tokens
        ended = sampler.sample(start, 1, params.model_copy(update={"max_tokens": 2000}), stream=True)
        for _ in ended:
            break
        stopped = ended.stop(PATIENCE_S)
        assert 0 < len(stopped.sequences[0].tokens) < 2000
        assert stopped.usage is not None
        assert stopped.usage.sample == len(stopped.sequences[0].tokens)
    body = {"model": BASE_MODEL, "prompt": start.to_ints(), "max_tokens": 400, "seed": 20, "stream": True}
    asked = {"json": body | {"return_token_ids": True, "stop_token_ids": [0]}, "headers": {"X-API-Key": key}}
    drawn, pieces = list[int](), 0
    with httpx.stream("POST", f"{url}/v1/completions", timeout=PATIENCE_S, **asked) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                pieces += 1
                drawn += json.loads(line[6:])["choices"][0].get("token_ids") or []
    assert line == "data: [DONE]" or drawn
    assert drawn == seen[: len(drawn)]
    assert pieces > 3


def retrieved(http: httpx.Client, request_id: str) -> httpx.Response:
    while True:
        reply = http.post("/api/v1/retrieve_future", json={"request_id": request_id})
        if reply.status_code != 408:
            return reply
