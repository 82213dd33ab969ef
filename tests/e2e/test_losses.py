"""Losses and optimizers that need more than one part of the service, driven by the official SDK."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.e2e.conftest import BASE_MODEL
from tests.e2e.data import ADAM, off, prompt, supervised

pytestmark = pytest.mark.server
Official = Callable[..., Any]


def weights_of(run: Any) -> np.ndarray:
    outputs = run.forward(supervised(seed=99), "cross_entropy").result().loss_fn_outputs
    return np.concatenate([o["logprobs"].to_numpy() for o in outputs])


def focal(logprobs, weights):
    loss = -(weights * (1 - torch.exp(logprobs)).pow(2) * logprobs).sum()
    return loss, {"custom/focal:sum": loss, "custom/share:mean": (logprobs > -1.0).float().mean()}


def test_a_custom_loss_on_the_server_equals_the_clients_own_run(official: Official) -> None:
    service = official()
    ranks = {"logprobs": 1, "weights": 1}
    handle = service.create_custom_loss(focal, ranks).result()
    assert handle.loss_id is not None
    found = []
    for loss in (handle, dataclasses.replace(handle, loss_id=None)):
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
        for step in range(2):
            backward, update = run.forward_backward_custom(supervised(seed=step), loss), run.optim_step(ADAM)
            metrics = backward.result().metrics
            update.result()
        found.append((weights_of(run), metrics))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-4)
    for name in ("loss:sum", "custom/focal:sum", "custom/share:mean"):
        assert found[0][1][name] == pytest.approx(found[1][1][name], rel=1e-4)


def test_a_custom_loss_that_the_server_does_not_allow(official: Official) -> None:
    def with_matmul(logprobs, weights):
        return torch.matmul(logprobs, weights), {}

    with pytest.raises(tinker.BadRequestError, match=r"torch\.matmul.*not one that a custom loss may call"):
        official().create_custom_loss(with_matmul, {"logprobs": 1, "weights": 1}).result()


def test_a_custom_loss_of_another_session_is_not_found(official: Official) -> None:
    handle = official().create_custom_loss(focal, {"logprobs": 1, "weights": 1}).result()
    for organisation in ("acme", "other"):
        run = official(organisation).create_lora_training_client(BASE_MODEL, rank=2).result()
        with pytest.raises(tinker.RequestFailedError, match="no custom loss"):
            run.forward_backward(supervised(), "custom", {"loss_id": handle.loss_id}).result()


def sampled_data(sampler: Any, *, logprobs: bool) -> list[types.Datum]:
    """Data as the cookbook's rl_loop builds them: spans, and the sampler's logprobs unless the server finds them."""
    start = prompt()
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=5, stop=[])
    data = []
    for i, sequence in enumerate(sampler.sample(start, 3, params).result().sequences):
        tokens, before = list(sequence.tokens), start.length - 1
        inputs = {
            "target_tokens": [0] * before + tokens,
            "advantages": [0.0] * before + [1.0 - i] * len(tokens),
        }
        if logprobs:
            inputs["logprobs"] = [0.0] * before + list(sequence.logprobs)
        datum = types.Datum(model_input=start.append(types.EncodedTextChunk(tokens=tokens[:-1])), loss_fn_inputs=inputs)
        name = sequence.sequence_id
        data.append(
            datum.with_provenance(
                model_input=[
                    types.PromptProvenanceSpan(sequence_id=name, length=start.length),
                    types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
                ],
                loss_fn_inputs=[
                    types.PromptProvenanceSpan(sequence_id=name, offset=1, length=start.length - 1),
                    types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
                ],
            )
        )
    return data


def test_stable_reinforce_takes_the_samplers_logprobs_from_the_data_or_from_its_record(official: Official) -> None:
    found = []
    for logprobs in (True, False):
        run = official().create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
        sampler = run.save_weights_and_get_sampling_client(record_stability_info=True).result()
        data = sampled_data(sampler, logprobs=logprobs)
        result = run.forward_backward(data, "stable_reinforce", {"kl_coeff": 0.02}).result()
        assert result.metrics["mismatch_kl:mean"] == pytest.approx(0.0, abs=1e-5)
        assert result.metrics["mask_fraction:mean"] == 0.0
        run.optim_step(ADAM).result()
        found.append(weights_of(run))
    np.testing.assert_array_equal(found[0], found[1])
    stranger = official().create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
    with pytest.raises(tinker.RequestFailedError, match="nothing is recorded of sequence"):
        stranger.forward_backward(data, "stable_reinforce").result()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_what_was_drawn_at_a_temperature_is_on_policy_there(official: Official, temperature: float) -> None:
    run = official().create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
    run.forward_backward(supervised(), "cross_entropy").result()
    run.optim_step(ADAM).result()
    sampler = run.save_weights_and_get_sampling_client().result()
    start, before = prompt(), prompt().length - 1
    params = types.SamplingParams(max_tokens=40, temperature=temperature, seed=5, stop=[])

    def datum(sequence: Any, **more: Any) -> types.Datum:
        tokens = list(sequence.tokens)
        inputs = {
            "target_tokens": [0] * before + tokens,
            "advantages": [0.0] * before + [1.0] * len(tokens),
            "logprobs": [0.0] * before + list(sequence.logprobs),
        }
        whole = start.append(types.EncodedTextChunk(tokens=tokens[:-1]))
        return types.Datum(model_input=whole, loss_fn_inputs=inputs | more)

    drawn = sampler.sample(start, 4, params).result().sequences
    told = [datum(sequence, sampling_temperature=np.float32([temperature])) for sequence in drawn]
    metrics = run.forward_backward(told, "importance_sampling").result().metrics
    assert metrics["ratio:mean"] == pytest.approx(1, abs=off(1e-6, 1e-5))
    assert abs(metrics["mismatch_kl:mean"]) <= 1e-8
    untold = run.forward([datum(sequence) for sequence in drawn], "importance_sampling").result()
    assert untold.metrics["mismatch_kl:mean"] > 1e-3
    at_one = [datum(sequence, sampling_temperature=np.ones(before + 40, np.float32)) for sequence in drawn]
    same = run.forward(at_one, "importance_sampling").result()
    for one, other in zip(same.loss_fn_outputs, untold.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(one["logprobs"].to_numpy(), other["logprobs"].to_numpy())
    for bad, says in (([0.0], "above 0"), ([1.0, 1.0], "one value, or one for each position")):
        with pytest.raises(tinker.RequestFailedError, match=says):
            run.forward([datum(drawn[0], sampling_temperature=np.float32(bad))], "ppo").result()


def test_dimuon_is_fixed_at_creation_and_survives_a_checkpoint(official: Official) -> None:
    service = official()
    run = service.create_lora_training_client(
        BASE_MODEL, rank=4, seed=1, optimizer=types.DimuonOptimizerConfig()
    ).result()
    assert run.get_info().optimizer_config.type == "dimuon"
    step = types.DimuonParams(learning_rate=0.01)
    first = run.forward_backward(supervised(), "cross_entropy").result().metrics["loss:sum"]
    assert run.optim_step(step).result().metrics["grad_norm:mean"] > 0
    path = run.save_state("half").result().path
    other = service.create_training_client_from_state_with_optimizer(path).result()
    assert other.get_info().optimizer_config.type == "dimuon"
    for each in (run, other):
        each.forward_backward(supervised(seed=1), "cross_entropy").result()
        each.optim_step(step).result()
    np.testing.assert_array_equal(weights_of(run), weights_of(other))
    assert run.forward(supervised(), "cross_entropy").result().metrics["loss:sum"] < first
    with pytest.raises(tinker.BadRequestError, match="optimizer is dimuon"):
        run.optim_step(ADAM).result()


def test_several_targets_sparse_or_dense_are_the_same(official: Official) -> None:
    run = official().create_lora_training_client(BASE_MODEL, rank=2).result()
    tokens = [50, 51, 52, 53]
    targets, weights = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, 16)
    for row, column, target, weight in ((0, 0, 60, 0.5), (2, 0, 61, 0.25), (2, 1, 62, 0.75), (3, 15, 63, 1.0)):
        targets[row, column], weights[row, column] = target, weight
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    dense = types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": targets.numpy(), "weights": weights.numpy()},
    )
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    results = [run.forward([datum], "cross_entropy").result() for datum in (sparse, dense)]
    logprobs = [result.loss_fn_outputs[0]["logprobs"].to_numpy() for result in results]
    assert logprobs[0].shape == (4, 16)
    np.testing.assert_array_equal(*logprobs)
    assert results[0].metrics["loss:sum"] == pytest.approx(-float((logprobs[0] * weights.numpy()).sum()), rel=1e-5)
