"""vLLM at the queue that replicas share: it serves base model and adapters, follows a policy, and may be killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import weft
from weft.types import ModelInput, SamplingParams

from scheduler.links.redis_queue import SAMPLES
from tests.e2e.conftest import BASE_MODEL
from tests.e2e.production import Production, production_of
from tests.servers import PostgresServer, redis_server
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.server,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    # A string, because pytest evaluates it when the test's turn comes: `.ci/run` builds vLLM during earlier tests.
    pytest.mark.skipif("not (ROOT / '.vllm' / '.setup-done').is_file()", reason="there is no vLLM here (make vllm)"),
]
#: No wait here takes that long, on any machine.
PATIENCE_S = 400
START = ModelInput.from_ints([40, 43, 46, 49])


@pytest.fixture
def redis_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


@pytest.fixture
def production(
    tmp_path: Path, postgres: PostgresServer, migrated_postgres: str, redis_url: str
) -> Iterator[Production]:
    with production_of(tmp_path, postgres, migrated_postgres, redis_url) as made:
        yield made


def test_vllm_works_from_redis_beside_the_other_engine_and_may_be_killed(
    production: Production, redis_url: str
) -> None:
    vllm = production.vllm()
    production.worker("trainer")
    (url,) = production.serve(1)
    queue = redis.Redis.from_url(redis_url, decode_responses=True)

    def held_by(process: Any) -> int:
        """How many samples this generator holds; its name ends with its process id and a random word."""
        names = queue.zrange(f"{{weft:{SAMPLES}}}:w", 0, -1)
        return sum(
            int(queue.scard(f"{{weft:{SAMPLES}}}:h:{name}")) for name in map(str, names) if f"-{process.pid}-" in name
        )

    with weft.ServiceClient(base_url=url, api_key=production.key()) as service:
        # No other client samples yet.
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1, train_unembed=False)
        snapshot = run.save_weights_and_get_sampling_client()
        base = service.create_sampling_client(base_model=BASE_MODEL)
        greedy = SamplingParams(max_tokens=10, temperature=0, stop=[])
        expected = [tokens(sampler.sample(START, 1, greedy)) for sampler in (base, snapshot)]
        follows_its_run(run)

        production.worker("generator")
        until(lambda: queue.zcard(f"{{weft:{SAMPLES}}}:w") == 2, PATIENCE_S)
        long = SamplingParams(max_tokens=200, seed=1, stop=[])
        futures = [sampler.sample(START, 1, long) for _ in range(4) for sampler in (base, snapshot)]
        until(lambda: held_by(vllm), PATIENCE_S)
        family = psutil.Process(vllm.pid).children(recursive=True)
        next(process for process in family if process.cmdline()[1].endswith("/bin/vllm")).kill()
        assert all(len(tokens(future)) == 200 for future in futures)
        until(lambda: not held_by(vllm), PATIENCE_S)
        vllm.kill()
        again = [tokens(sampler.sample(START, 1, greedy)) for sampler in (base, snapshot)]
    assert again == expected  # a sample of the other engine
    assert production.query("select kind, error from operations where state = 'failed'") == []
    drawn = production.query("select policy -> 'drawn' from operations where kind = 'sample' and policy is not null")
    assert max(len(by_version) for (sequences,) in drawn for by_version in sequences) > 1


def tokens(future: Any) -> list[int]:
    (sequence,) = future.result(PATIENCE_S).sequences
    return list(sequence.tokens)


def follows_its_run(run: Any) -> None:
    sampler = run.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE_S)
    for _ in range(5):  # on a busy machine all samples may be drawn before the first step, or after the last
        drawn = sampler.sample(START, 1, SamplingParams(max_tokens=500, seed=1, stop=[]))
        for _ in range(6):
            run.optim_step(weft.AdamParams(learning_rate=1e-3)).result(PATIENCE_S)
            run.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE_S)
        (found,) = drawn.result(PATIENCE_S).sequences
        versions = [span.version for span in found.policy_versions]
        if len(versions) > 1:
            break
    assert len(versions) > 1
    assert versions == sorted(set(versions))
    assert sum(span.length for span in found.policy_versions) == 500
