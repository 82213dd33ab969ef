"""Over Redis, too, a generator whose slots are all held by long sequences makes way for an organisation that has none
(in one process: `test_queues.py`). The official client sends everything."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import redis
import tinker
from tinker import types

from tests.e2e.conftest import BASE_MODEL
from tests.e2e.data import prompt
from tests.e2e.production import Production, production_of
from tests.servers import OwnRedis, PostgresServer
from tests.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
SLOTS = 4  # of the production's generators
LONG = 1200
PATIENCE_S = 240


@pytest.fixture
def production(
    tmp_path: Path, postgres: PostgresServer, migrated_postgres: str, own_redis: OwnRedis
) -> Iterator[Production]:
    with production_of(tmp_path, postgres, migrated_postgres, own_redis.url) as made:
        yield made


def in_hand(own: OwnRedis) -> int:
    """How many samples generators hold."""
    with redis.Redis.from_url(own.url) as client:
        return sum(client.scard(key) for key in client.keys("*:h:generator-*"))  # type: ignore[misc, arg-type, union-attr]


def test_a_newcomer_is_answered_while_long_sequences_hold_every_slot(
    production: Production, own_redis: OwnRedis
) -> None:
    (url,) = production.serve(1)
    production.worker("generator")
    flood, late = (
        tinker.ServiceClient(base_url=url, api_key=production.key(name))
        .create_sampling_client(base_model=BASE_MODEL)
        .result()
        for name in ("flood", "late")
    )

    def ask(sampler: tinker.SamplingClient, tokens: int, seed: int) -> Future[Any]:
        params = types.SamplingParams(max_tokens=tokens, seed=seed, stop=[])
        return sampler.sample(prompt(), 1, params).future()

    alone = ask(flood, LONG, 0).result(PATIENCE_S)
    futures = [ask(flood, LONG, seed) for seed in range(SLOTS + 2)]
    until(lambda: in_hand(own_redis) >= SLOTS, PATIENCE_S)
    for seed in range(3):
        ask(late, 5, seed).result(PATIENCE_S)
    assert not any(future.done() for future in futures)
    ended = [future.result(PATIENCE_S) for future in futures]
    assert [len(sample.sequences[0].tokens) for sample in ended] == [LONG] * len(futures)
    assert ended[0].sequences[0].tokens == alone.sequences[0].tokens
