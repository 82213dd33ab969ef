"""The unmodified official SDK against a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.data import ADAM, assert_as_in_other_company, prompt, supervised

pytestmark = pytest.mark.server
Official = Callable[..., Any]


def losses(run: Any, steps: int, seed: int = 0) -> list[float]:
    data = supervised(seed=seed)
    found = []
    for _ in range(steps):
        backward, update = run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)
        found.append(backward.result().metrics["loss:sum"])
        update.result()
    return found


def weights_of(run: Any) -> np.ndarray:
    """Logprobs of a fixed batch under the run's present weights, as their fingerprint."""
    outputs = run.forward(supervised(seed=99), "cross_entropy").result().loss_fn_outputs
    return np.concatenate([o["logprobs"].to_numpy() for o in outputs])


def test_train_save_sample(official: Official) -> None:
    service = official()
    run = service.create_lora_training_client(BASE_MODEL, rank=8).result()
    assert run.get_info().model_data.model_name == BASE_MODEL
    before = weights_of(run)
    found = losses(run, 6)
    assert found[-1] < 0.7 * found[0]
    after = weights_of(run)
    assert not np.allclose(before, after)
    sampler = run.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=10, temperature=0.0, stop=[])
    reply = sampler.sample(prompt(), 2, params).result()
    assert [len(s.tokens) for s in reply.sequences] == [10, 10]
    assert reply.sequences[0].tokens == reply.sequences[1].tokens
    assert reply.sequences[0].stop_reason == "length"


def test_sampler_and_trainer_agree(official: Official) -> None:
    run = official().create_lora_training_client(BASE_MODEL, rank=4).result()
    losses(run, 3)
    sampler = run.save_weights_and_get_sampling_client().result()
    (sequence,) = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=12, seed=3, stop=[])).result().sequences
    tokens = prompt().to_ints() + list(sequence.tokens)
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    trained = run.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(trained[-12:], sequence.logprobs, atol=1e-4)
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert scored[0] is None
    np.testing.assert_allclose(np.array(scored[1:], dtype=float), trained, atol=1e-4)


#: In a process of its own, since the hub's client reads its address when it is imported.
LOOKS_IT_UP = """
import sys
import tinker
from huggingface_hub import HfApi, snapshot_download

model = sys.argv[1]
service = tinker.ServiceClient()
run = service.create_lora_training_client(model, rank=4)
tokenizer = run.get_tokenizer()
assert tokenizer.decode(tokenizer.encode("3 + 5 = 8")) == "3 + 5 = 8"
assert service.create_sampling_client(base_model=model).get_tokenizer().get_vocab() == tokenizer.get_vocab()
assert HfApi().model_info(model).sha in snapshot_download(model)
"""


def test_its_get_tokenizer_asks_the_hub_which_the_server_is(weftd: Weftd, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TINKER_BASE_URL": weftd.url,
        "TINKER_API_KEY": weftd.key(),
        "HF_ENDPOINT": f"{weftd.url}/hub",
        "HF_TOKEN": weftd.key(),
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }
    subprocess.run([sys.executable, "-c", LOOKS_IT_UP, BASE_MODEL], env=environment, check=True)
    names = {file.name for file in (tmp_path / "hub").rglob("snapshots/*/*")}
    assert {"tokenizer.json", "config.json"} <= names
    assert not any("safetensors" in name for name in names)


def test_eight_clients_in_parallel_each_end_as_if_alone(official: Official) -> None:
    def tenant(i: int) -> tuple[list[float], np.ndarray]:
        run = official(f"parallel-{i % 4}").create_lora_training_client(BASE_MODEL, rank=4 + 2 * (i % 3), seed=7)
        return losses(run, 3, seed=i), weights_of(run)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(tenant, range(8)))
    for i in (0, 5):
        alone = tenant(i)
        for found, wanted in zip(together[i], alone, strict=True):
            assert_as_in_other_company(found, wanted)


def test_submissions_pipelined_without_awaiting(official: Official) -> None:
    def fingerprint(pipelined: bool) -> np.ndarray:
        run = official().create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
        futures = []
        for step in range(5):
            futures += [run.forward_backward(supervised(seed=step), "cross_entropy"), run.optim_step(ADAM)]
            if not pipelined:
                for future in futures:
                    future.result()
        for future in futures:
            future.result()
        return weights_of(run)

    np.testing.assert_array_equal(fingerprint(True), fingerprint(False))


def test_chunks_arrive_first_chunk_last(official: Official) -> None:
    """1,500 data are two chunks; the SDK posts the second one first. Outputs come back in the order of the data."""
    tokens = np.arange(1500) % 200 + 30
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([50, int(t)]),
            loss_fn_inputs={"target_tokens": [int(t), 60], "weights": [1.0, 1.0]},
        )
        for t in tokens
    ]
    run = official().create_lora_training_client(BASE_MODEL, rank=2).result()
    result = run.forward_backward(data, "cross_entropy").result()
    run.optim_step(ADAM).result()
    assert len(result.loss_fn_outputs) == 1500
    first = {int(t): o["logprobs"].to_numpy()[0] for t, o in zip(tokens, result.loss_fn_outputs, strict=True)}
    for t, output in zip(tokens, result.loss_fn_outputs, strict=True):
        assert output["logprobs"].to_numpy()[0] == pytest.approx(first[int(t)], abs=1e-5)
    total = sum(float(o["logprobs"].to_numpy().sum()) for o in result.loss_fn_outputs)
    assert result.metrics["loss:sum"] == pytest.approx(-total, rel=1e-4)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_rl_losses_on_policy_push_the_rewarded_tokens_up(official: Official, loss: str) -> None:
    run = official().create_lora_training_client(BASE_MODEL, rank=8).result()
    tokens = [45, 50, 55, 60, 65, 70]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 5}
    plain = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    sampled = run.forward([plain], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    inputs = {"target_tokens": tokens[1:], "logprobs": sampled.tolist(), "advantages": [1.0] * 5}
    rewarded = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    backward, update = run.forward_backward([rewarded], loss), run.optim_step(ADAM)
    assert "loss:sum" in backward.result().metrics
    update.result()
    after = run.forward([plain], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert after.sum() > sampled.sum()


def test_named_saves_load_and_sample(official: Official) -> None:
    service = official()
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    losses(run, 2)
    state = run.save_state("half-way").result().path
    named = run.save_weights_for_sampler("shown").result().path
    assert state == f"tinker://{run.model_id}/weights/half-way"
    assert named == f"tinker://{run.model_id}/sampler_weights/shown"
    went_on = losses(run, 3)
    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    assert losses(resumed, 3) == went_on
    np.testing.assert_array_equal(weights_of(resumed), weights_of(run))
    sampler = service.create_sampling_client(model_path=named).result()
    base = service.create_sampling_client(base_model=BASE_MODEL).result()
    params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    assert len(sampler.sample(prompt(), 1, params).result().sequences[0].tokens) == 6
    assert len(base.sample(prompt(), 3, params).result().sequences) == 3
    listed = service.create_rest_client().list_checkpoints(run.model_id).result().checkpoints
    assert {c.tinker_path for c in listed} == {state, named}


def test_a_saved_sampler_never_changes(official: Official) -> None:
    run = official().create_lora_training_client(BASE_MODEL, rank=8).result()
    losses(run, 2)
    sampler = run.save_weights_and_get_sampling_client().result()
    before = sampler.compute_logprobs(prompt(12)).result()
    losses(run, 4, seed=3)
    assert sampler.compute_logprobs(prompt(12)).result() == before
    assert run.save_weights_and_get_sampling_client().result().compute_logprobs(prompt(12)).result() != before


def test_custom_loss_of_the_client(official: Official) -> None:
    """forward_backward_custom is a forward, the client's own autograd, and a weighted cross entropy."""
    torch = pytest.importorskip("torch")
    run = official().create_lora_training_client(BASE_MODEL, rank=4).result()

    def loss(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = torch.stack([(lp.float() ** 2).sum() for lp in logprobs]).sum()
        return total, {"square:sum": float(total)}

    first = run.forward_backward_custom(supervised(), loss).result().metrics["square:sum"]
    run.optim_step(ADAM).result()
    second = run.forward_backward_custom(supervised(), loss).result().metrics["square:sum"]
    assert second < first
