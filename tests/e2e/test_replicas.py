"""Several generators at one queue share the work, and if one is killed nobody loses or pays anything."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.data import prompt
from tests.waiting import until

pytestmark = pytest.mark.server
ROOT = Path(__file__).resolve().parents[2]


def sampler(server: Weftd) -> Any:
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key())
    return service.create_sampling_client(base_model=BASE_MODEL).result()


def ask(client: Any, count: int, max_tokens: int = 150) -> list[Any]:
    return [
        client.sample(prompt(), 2, types.SamplingParams(max_tokens=max_tokens, seed=i, stop=[])) for i in range(count)
    ]


def tokens(futures: list[Any]) -> list[list[list[int]]]:
    return [[sequence.tokens for sequence in future.result(timeout=120).sequences] for future in futures]


def replicas(server: Weftd) -> dict[str, dict[str, int]]:
    with httpx.Client(base_url=server.url, headers={"X-API-Key": server.key()}) as http:
        found: dict[str, dict[str, int]] = http.get("/api/v1/weft/stats").json()["generator"]["replicas"]
    return found


def test_replicas_share_the_work_and_one_that_is_killed_loses_nothing(
    own_weftd: Callable[..., Weftd], tmp_path: Path
) -> None:
    config = tmp_path / "weft.toml"
    config.write_text("[generator]\nreplicas = 2\nslots = 4\nthreads = 1\n")
    server = own_weftd("--config", str(config))
    client = sampler(server)
    calm = tokens(ask(client, 8))
    futures = ask(client, 8)
    victims = server.workers("generator")
    assert len(victims) == 2
    until(lambda: all(one["held"] for one in replicas(server).values()), said=lambda: replicas(server))
    victims[0].kill()
    assert tokens(futures) == calm
    with sqlite3.connect(f"file:{server.data_dir / 'weft.db'}?mode=ro", uri=True) as db:
        (sampled,) = db.execute("select sum(quantity) from usage_events where kind='sample'").fetchone()
    assert sampled == 2 * 8 * 2 * 150


@pytest.mark.long  # tests/e2e/test_production_vllm.py has both kinds behind Redis
@pytest.mark.vllm
@pytest.mark.skipif(not (ROOT / ".vllm" / ".setup-done").is_file(), reason="there is no vLLM here (make vllm)")
def test_both_kinds_behind_one_queue(own_weftd: Callable[..., Weftd], tmp_path: Path) -> None:
    """A run that vLLM cannot serve is sampled by the other generator; any other run by either."""
    config = tmp_path / "weft.toml"
    config.write_text("[generator]\nslots = 4\nthreads = 1\n[generator.vllm]\nmax_adapters = 4\nmax_rank = 8\n")
    server = own_weftd("--config", str(config), "--engine", "torch", "--engine", "vllm")
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key())
    for unembed in (False, True):
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1, train_unembed=unembed).result()
        client = run.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=30, temperature=0, stop=[])
        futures = [client.sample(prompt(), 1, params) for _ in range(12)]
        found = {tuple(future.result(timeout=120).sequences[0].tokens) for future in futures}
        assert len(found) == 1
    stats = replicas(server)
    assert stats["generator"]["steps"] > 0
    assert stats["generator-2"]["steps"] > 0
