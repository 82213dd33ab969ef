"""Fifty runs on a trainer with memory for eight, which is killed meanwhile: each run ends as if it had been alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from weft.wire.binary.train_codec import ArrayDatum, decode_train_output

from tests.e2e.conftest import Weftd
from tests.e2e.raw import Post, RawClient, optim_post, train_post

pytestmark = pytest.mark.server

RUNS = 50
#: A run of rank 2 of the built-in model takes some 800 kB.
RESIDENT_BYTES = 8 << 20
SAMPLED = (0, 17, 42, 49)


def datum(seed: int) -> ArrayDatum:
    rng = np.random.default_rng(seed)
    length = 4 + seed % 9
    inputs = {"target_tokens": rng.integers(20, 500, length), "weights": np.ones(length, np.float32)}
    return ArrayDatum(rng.integers(20, 500, length).astype(np.int32), inputs)


def first_part(run_id: str, number: int) -> list[Post]:
    """One step from two forward_backwards, and a gradient for the next step."""
    return [
        train_post(run_id, 1, [datum(number)]),
        train_post(run_id, 2, [datum(number + 1000)]),
        optim_post(run_id, 3, 1e-3 * (1 + number % 5)),
        train_post(run_id, 4, [datum(number + 2000)]),
    ]


def second_part(run_id: str, number: int) -> list[Post]:
    """The next step, and a forward whose logprobs show the run's weights."""
    return [optim_post(run_id, 5, 2e-3), train_post(run_id, 6, [datum(7)], forward_only=True)]


def send(client: RawClient, posts: list[Post]) -> str:
    """Submit the operations; returns the request id of the last one."""
    replies = [client.post(post) for post in posts]
    assert [reply.status_code for reply in replies] == [200] * len(posts), replies[-1].text
    return str(replies[-1].json()["request_id"])


def test_fifty_runs_with_memory_for_a_few(own_weftd: Callable[..., Weftd], tmp_path: Path) -> None:
    config = tmp_path / "weft.toml"
    config.write_text(f"[trainer]\nresident_bytes = {RESIDENT_BYTES}\n")
    server = own_weftd("--config", str(config))
    client = RawClient(server, "crowd")
    runs = [client.new_run(rank=2, seed=number) for number in range(RUNS)]
    assert pages(server) > RUNS // 2
    half_way = [send(client, first_part(run_id, number)) for number, run_id in enumerate(runs)]
    killed = server.worker("trainer")
    client.result(half_way[RUNS // 2])
    killed.kill()
    futures = [send(client, second_part(run_id, number)) for number, run_id in enumerate(runs)]
    found = [client.result(future) for future in futures]
    assert server.worker("trainer").pid != killed.pid
    assert pages(server) > RUNS // 2

    ample = RawClient(own_weftd(), "alone")
    for number in SAMPLED:
        alone = ample.new_run(rank=2, seed=number)
        future = send(ample, first_part(alone, number) + second_part(alone, number))
        assert logprobs(ample.result(future)) == logprobs(found[number])
    assert server.stop() == 0, server.log()
    assert pages(server) == 0


def pages(server: Weftd) -> int:
    return len(list((server.data_dir / "pages").rglob("*.page")))


def logprobs(result: bytes) -> list[float]:
    """Logprobs of the only datum; of an error its JSON."""
    assert not result.startswith(b"{"), json.loads(result)
    [output], _ = decode_train_output(result)
    return [float(x) for x in output["logprobs"]]
