"""Everything a sample request can ask for, with the unmodified official SDK against a real server."""

from __future__ import annotations

import pickle
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, wait as wait_all
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from store.blobs.folder import FolderBlobs
from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.data import ADAM, assert_as_in_other_company, prompt, supervised
from tests.forked import Forked
from tests.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.filterwarnings("ignore::FutureWarning")]
Official = Callable[..., Any]
ONE = types.SamplingParams(max_tokens=1, temperature=0.0, stop=[])


def base(official: Official, organisation: str = "sampling") -> Any:
    return official(organisation).create_sampling_client(base_model=BASE_MODEL).result()


def tokens(length: int, seed: int = 0) -> types.ModelInput:
    return types.ModelInput.from_ints(np.random.default_rng(seed).integers(20, 400, length).tolist())


def usage(server: Weftd, organisation: str) -> dict[str, int]:
    """Tokens billed to an organisation, by kind."""
    with sqlite3.connect(server.data_dir / "weft.db") as database:
        rows = database.execute(
            "SELECT kind, SUM(quantity) FROM usage_events JOIN organisations o ON o.id = org_id WHERE o.name = ?"
            " GROUP BY kind",
            [organisation],
        )
        return dict(rows.fetchall())


# -- about the prompt and beside the sample


def test_tables_of_prompt_and_sample_agree(official: Official) -> None:
    sampler = base(official)
    params = types.SamplingParams(max_tokens=6, temperature=0.5, seed=1, stop=[])
    (sampled,) = sampler.sample(tokens(9), 1, params, topk_sample_logprobs=2).result().sequences
    assert sampled.topk_logprobs_np.token_ids.shape == (6, 2)
    whole = types.ModelInput.from_ints([*tokens(9).to_ints(), *sampled.tokens])
    scored = sampler.sample(whole, 1, ONE, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    assert scored.prompt_logprobs[0] is None
    assert scored.topk_prompt_logprobs[0] is None
    for row, unscaled in zip(sampled.topk_logprobs, scored.topk_prompt_logprobs[9:], strict=True):
        assert [token for token, _ in row] == [token for token, _ in unscaled]
        # At temperature 0.5 differences between logits double.
        assert row[0][1] - row[1][1] == pytest.approx((unscaled[0][1] - unscaled[1][1]) / 0.5, abs=1e-3)
    for token, logprob, row in zip(sampled.tokens, sampled.logprobs, sampled.topk_logprobs, strict=True):
        assert dict(row).get(token, logprob) == pytest.approx(logprob, abs=1e-6)


def test_only_the_last_n_are_scored(official: Official) -> None:
    sampler = base(official)
    given = tokens(80, seed=2)
    whole = sampler.sample(given, 1, ONE, include_prompt_logprobs=True).result()
    last = sampler.sample(
        given, 1, ONE, include_prompt_logprobs=True, prompt_logprobs_last_n=5, topk_prompt_logprobs=3
    ).result()
    assert last.prompt_logprobs[:75] == last.topk_prompt_logprobs[:75] == [None] * 75
    assert_as_in_other_company(last.prompt_logprobs[75:], whole.prompt_logprobs[75:])
    assert last.prompt_cache_hit_tokens == 64
    again = sampler.compute_logprobs(given, 5).result()
    assert again[:75] == [None] * 75
    assert_as_in_other_company(again[75:], last.prompt_logprobs[75:])


@pytest.mark.parametrize("sparse", [False, True])
def test_chosen_tokens_are_scored_in_the_layout_they_came_in(official: Official, sparse: bool) -> None:
    sampler = base(official)
    given = tokens(12, seed=3)
    ids = torch.full((11, 4), -1, dtype=torch.int64)
    ids[:, 1] = torch.tensor(given.to_ints()[1:])
    ids[5, 3] = 0
    make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
    target = make(ids, pad_value=-1) if sparse else make(ids)  # type: ignore[call-arg]
    told = sampler.sample(given, 1, ONE, include_prompt_logprobs=True, target_prompt_logprobs=target).result()
    assert (told.target_prompt_logprobs.sparse_crow_indices is not None) == sparse
    scores = told.target_prompt_logprobs.to_torch()
    scores = (scores.to_dense() if scores.is_sparse_csr else scores).numpy()
    assert scores.shape == (11, 4)
    np.testing.assert_allclose(scores[:, 1], told.prompt_logprobs[1:], atol=1e-6)
    assert scores[5, 3] < 0
    assert not scores[:, [0, 2]].any()


def test_alternatives_are_drawn_from_the_model(official: Official) -> None:
    sampler = base(official)
    params = types.SamplingParams(max_tokens=1, seed=5)
    told = sampler.sample(tokens(10, seed=4), 1, params, prompt_alt_tokens_k=50, topk_prompt_logprobs=100).result()
    drawn = told.prompt_alt_tokens.tokens.to_numpy()
    logprobs = told.prompt_alt_tokens.logprobs.to_numpy()
    assert drawn.shape == logprobs.shape == (9, 50)
    for row, row_logprobs, table in zip(drawn, logprobs, told.topk_prompt_logprobs[1:], strict=True):
        known = dict(table)
        for token, logprob in zip(row.tolist(), row_logprobs.tolist(), strict=True):
            assert known.get(token, logprob) == pytest.approx(logprob, abs=1e-5)
    again = sampler.sample(tokens(10, seed=4), 1, params, prompt_alt_tokens_k=50).result()
    np.testing.assert_array_equal(again.prompt_alt_tokens.tokens.to_numpy(), drawn)
    greedy = sampler.sample(tokens(10, seed=4), 1, ONE, prompt_alt_tokens_k=1, topk_prompt_logprobs=1).result()
    best = [row[0][0] for row in greedy.topk_prompt_logprobs[1:]]
    assert greedy.prompt_alt_tokens.tokens.to_numpy()[:, 0].tolist() == best


def test_seeds_make_samples_and_their_order(official: Official) -> None:
    sampler = base(official)
    params = types.SamplingParams(max_tokens=8, seed=9, stop=[])
    three = sampler.sample(prompt(), 3, params).result().sequences
    assert [s.tokens for s in sampler.sample(prompt(), 3, params).result().sequences] == [s.tokens for s in three]
    assert sampler.sample(prompt(), 1, params).result().sequences[0].tokens == three[0].tokens
    assert len({tuple(s.tokens) for s in three}) == 3
    assert len({s.sequence_id for s in three}) == 3


def test_what_sequences_were_sampled_with_is_recorded(official: Official, weftd: Weftd) -> None:
    sampler = official("sampling").create_sampling_client(base_model=BASE_MODEL, record_stability_info=True).result()
    params = types.SamplingParams(max_tokens=5, stop=[])
    session = sampler._sampling_session_id.split(":")[0]
    for sequence in sampler.sample(prompt(), 2, params).result().sequences:
        blob = FolderBlobs(weftd.data_dir / "blobs").get(f"stability/{session}/{sequence.sequence_id}")
        assert np.frombuffer(blob, "<f4").tolist() == sequence.logprobs


# -- the prefix cache and the bill


def test_a_repeated_prompt_is_a_cache_hit_and_billed_as_one(official: Official, weftd: Weftd) -> None:
    sampler = base(official, "thrifty")
    params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
    given = tokens(100, seed=6)
    first = sampler.sample(given, 1, params).result()
    assert first.prompt_cache_hit_tokens == 0
    assert usage(weftd, "thrifty") == {"prefill": 100, "sample": 4}
    again = sampler.sample(given, 2, params).result()
    assert again.prompt_cache_hit_tokens == 96
    assert usage(weftd, "thrifty") == {"prefill": 104, "cached_prefill": 96 + 100, "sample": 12}
    assert again.sequences[0].tokens == first.sequences[0].tokens
    assert again.sequences[0].logprobs == first.sequences[0].logprobs
    resumed = types.ModelInput.from_ints(given.to_ints() + first.sequences[0].tokens)
    assert sampler.sample(resumed, 1, params).result().prompt_cache_hit_tokens == 96
    assert base(official, "curious").sample(given, 1, params).result().prompt_cache_hit_tokens == 0


# -- cancelling, back-pressure, many at once


def test_a_cancelled_sample_is_billed_for_what_it_made(official: Official, weftd: Weftd) -> None:
    sampler = base(official, "hasty")
    sampler.sample(prompt(), 1, ONE).result()
    before = usage(weftd, "hasty")["sample"]
    long = types.SamplingParams(max_tokens=2000, stop=[])
    future = sampler.sample(prompt(), 4, long).future()
    time.sleep(0.5)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    until(lambda: usage(weftd, "hasty")["sample"] > before, 20)
    assert usage(weftd, "hasty")["sample"] - before < 4 * 2000


def small(own_weftd: Callable[..., Weftd], tmp_path: Path, text: str) -> Weftd:
    config = tmp_path / "weft.toml"
    config.write_text(text)
    return own_weftd("--config", str(config))


def test_a_cancelled_sample_that_waited_is_not_billed(own_weftd: Callable[..., Weftd], tmp_path: Path) -> None:
    server = small(own_weftd, tmp_path, "[generator]\nslots = 1\n")
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key("a"))
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    running = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=1500, stop=[]))
    time.sleep(0.3)
    waiting = sampler.sample(prompt(40), 1, types.SamplingParams(max_tokens=7, stop=[])).future()
    time.sleep(0.3)
    assert waiting.cancel()
    assert len(running.result().sequences[0].tokens) == 1500
    sampler.sample(prompt(), 1, ONE).result()
    assert usage(server, "a") == {"prefill": 2 * 8, "sample": 1501}


def test_a_full_queue_slows_the_client_down(own_weftd: Callable[..., Weftd], tmp_path: Path) -> None:
    server = small(own_weftd, tmp_path, "[limits]\nmax_queued_ops_per_org = 6\n[generator]\nslots = 2\n")
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key("a"))
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    params = types.SamplingParams(max_tokens=20, stop=[])
    futures = [sampler.sample(prompt(4 + i), 1, params) for i in range(24)]
    assert [len(future.result().sequences[0].tokens) for future in futures] == [20] * 24
    assert usage(server, "a")["sample"] == 24 * 20
    assert sampler.holder._sample_backoff_until is not None  # after the server said 429 and the client waited


def test_many_in_flight(official: Official) -> None:
    sampler = base(official, "busy")
    params = types.SamplingParams(max_tokens=2, stop=[])
    futures = [sampler.sample(prompt(3 + i % 20), 1, params).future() for i in range(500)]
    done, _ = wait_all(futures, timeout=120)
    assert len(done) == 500
    assert all(len(future.result().sequences[0].tokens) == 2 for future in futures)


def test_samples_in_flight_outlive_a_killed_server(own_weftd: Callable[..., Weftd]) -> None:
    server = own_weftd()
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key("a"))
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    params = types.SamplingParams(max_tokens=120, seed=2, stop=[])
    calm = sampler.sample(prompt(), 1, params).result().sequences[0].tokens
    futures = [sampler.sample(prompt(), 1, params) for _ in range(40)]
    done = futures[0].result().sequences[0].tokens
    server.kill()
    server.start()
    assert [future.result().sequences[0].tokens for future in futures] == [calm] * 40
    assert done == calm
    assert usage(server, "a")["sample"] == 41 * 120


# -- clients of one sampler


CLONE = """
import pickle, sys
from tinker import types
sampler = pickle.load(open(sys.argv[1], "rb"))
params = types.SamplingParams(max_tokens=4, seed=3, stop=[])
prompt = types.ModelInput.from_ints([50, 60, 70])
print([sampler.sample(prompt, 1, params).result().sequences[0].tokens for _ in range(2)], sampler._cloned_sampler_id)
"""


def test_pickled_clients_sample_beside_the_original(official: Official, tmp_path: Path) -> None:
    sampler = base(official)
    (tmp_path / "sampler").write_bytes(pickle.dumps(sampler))
    clones = [Forked("-c", CLONE, str(tmp_path / "sampler")) for _ in range(2)]
    params = types.SamplingParams(max_tokens=4, seed=3, stop=[])
    mine = sampler.sample(types.ModelInput.from_ints([50, 60, 70]), 1, params).result().sequences[0].tokens
    said = sorted(clone.communicate(timeout=60)[0].strip() for clone in clones)
    assert said == [f"{[mine, mine]} 1", f"{[mine, mine]} 2"]


def test_inflight_clients_follow_their_run_and_snapshots_do_not(official: Official) -> None:
    run = official("sampling").create_lora_training_client(BASE_MODEL, rank=8).result()

    def step() -> None:
        backward, update = run.forward_backward(supervised(), "cross_entropy"), run.optim_step(ADAM)
        backward.result()
        update.result()

    def logprobs(client: Any) -> list[float | None]:
        return client.compute_logprobs(prompt(40)).result()  # type: ignore[no-any-return]

    step()
    snapshot = run.save_weights_and_get_sampling_client().result()
    first = run.save_weights_and_get_sampling_client(kind="inflight").result()
    old = logprobs(first)
    assert logprobs(snapshot) == old
    step()
    assert logprobs(first) == old
    second = run.save_weights_and_get_sampling_client(kind="inflight").result()
    new = logprobs(second)
    assert new != old
    assert logprobs(first) == new
    assert logprobs(snapshot) == old
