"""Several API replicas and workers share one queue: what is accepted anywhere ends, once, whoever is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis
import tinker
from tinker import types

from tests.e2e.conftest import BASE_MODEL
from tests.e2e.data import prompt
from tests.e2e.production import Production, stop
from tests.e2e.test_crashes import fingerprint, train
from tests.servers import PostgresServer, redis_server

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def own_redis() -> Iterator[str]:
    """A Redis of its own, which loses everything now and then."""
    with redis_server() as url:
        yield url


@pytest.fixture
def production(
    tmp_path: Path, postgres: PostgresServer, migrated_postgres: str, own_redis: str
) -> Iterator[Production]:
    name = postgres.create(migrated_postgres)
    redis.Redis.from_url(own_redis).flushall()
    made = Production(tmp_path, postgres.url(name), own_redis)
    yield made
    made.close()
    postgres.drop(name)


def sampled(client: Any) -> list[list[int]]:
    params = types.SamplingParams(max_tokens=60, seed=1, stop=[])
    return [s.tokens for s in client.sample(prompt(), 3, params).result(timeout=120).sequences]


def test_nothing_is_lost_or_billed_twice_whoever_is_killed(production: Production, own_redis: str) -> None:
    one, two = production.serve(), production.serve()
    replicas = {"one": one[1], "two": two[1]}
    processes = {"one": one[0], "two": two[0]}
    trainer, generators = production.worker("trainer"), [production.worker("generator") for _ in range(2)]
    leader = production.leader(replicas)
    other = next(name for name in replicas if name != leader)
    key = production.key()
    # The client stays with the replica that is never killed; the leader serves another one.
    service = tinker.ServiceClient(base_url=replicas[other], api_key=key)
    there = tinker.ServiceClient(base_url=replicas[leader], api_key=key)

    calm = there.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result(timeout=120)
    expected = train(calm, 6), fingerprint(calm)
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    drawn = sampled(sampler)
    assert sampled(there.create_sampling_client(base_model=BASE_MODEL).result()) == drawn

    def disturb(step: int) -> None:
        if step == 1:
            nonlocal trainer
            trainer.kill()
            trainer = production.worker("trainer")
        elif step == 2:
            redis.Redis.from_url(own_redis).flushall()
        elif step == 4:
            processes[leader].kill()

    shaken = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result(timeout=120)
    futures = [sampler.sample(prompt(), 3, types.SamplingParams(max_tokens=60, seed=1, stop=[])) for _ in range(8)]
    generators[0].kill()
    found = train(shaken, 6, disturb), fingerprint(shaken)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    for future in futures:
        assert [s.tokens for s in future.result(timeout=120).sequences] == drawn
    assert production.leader({other: replicas[other]}) == other

    assert len(sampled(shaken.save_weights_and_get_sampling_client().result())) == 3
    (queued,) = production.query("select count(*) from operations where state = 'queued'")[0]
    failed = production.query("select kind, error from operations where state = 'failed'")
    doubled = production.query(
        "select operation_id, kind, count(*) from usage_events where operation_id is not null "
        "group by operation_id, kind having count(*) > 1"
    )
    (trained,) = production.query("select count(*) from operations where kind = 'forward_backward'")[0]
    (billed,) = production.query("select count(distinct operation_id) from usage_events where kind = 'train'")[0]
    assert (queued, failed, doubled) == (0, [], [])
    assert trained == billed == 12
    assert stop(processes[other]) == 0, production.log()


def test_without_redis_nothing_new_is_accepted_and_results_can_be_had(
    production: Production, tmp_path: Path, own_redis: str
) -> None:
    with redis_server() as url:
        production.config.write_text(production.config.read_text().replace(own_redis, url))
        _, address = production.serve()
        production.worker("generator")
        headers = {"X-API-Key": production.key()}
        http = httpx.Client(base_url=address, headers=headers, timeout=60)
        session = http.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        sampler = http.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"]
        request = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [40, 43, 46]}]},
            "num_samples": 1,
            "sampling_params": {"max_tokens": 4},
        }
        accepted = http.post("/api/v1/asample", json=request).json()["request_id"]
        assert retrieved(http, accepted).status_code == 200
    reply = http.post("/api/v1/asample", json=request | {"seq_id": 1})
    deadline = time.monotonic() + 20
    while reply.status_code == 200 and time.monotonic() < deadline:  # it may not have noticed yet
        reply = http.post("/api/v1/asample", json=request | {"seq_id": time.time_ns() % 10**9})
    assert reply.status_code == 503
    assert "retry-after" in reply.headers
    assert retrieved(http, accepted).status_code == 200
    assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200


def retrieved(http: httpx.Client, request_id: str) -> httpx.Response:
    while True:
        reply = http.post("/api/v1/retrieve_future", json={"request_id": request_id})
        if reply.status_code != 408:
            return reply
