"""Rollout routing replay through the API, with our own client."""

from __future__ import annotations

import numpy as np
import pytest
import weft
from weft.types import Datum, ModelInput, SamplingParams

from tests.e2e.conftest import BASE_MODEL, Weftd

pytestmark = pytest.mark.server
PROMPT = [40, 43, 46, 49, 52]


def test_sampled_routes_train(weftd: Weftd) -> None:
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("replay")) as service:
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5)
        sampler = run.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=12, seed=3, stop=[])
        drawn = sampler.sample(ModelInput.from_ints(PROMPT), 2, params, return_routed_experts=True).result(60)
        data, sampled = [], []
        for sequence in drawn.sequences:
            routes = sequence.routed_experts_np
            assert routes is not None
            assert routes.shape[0] == len(PROMPT) + len(sequence.tokens) - 1
            tokens = [*PROMPT, *sequence.tokens]
            inputs = {
                "target_tokens": np.array(tokens[1:]),
                "logprobs": np.array([0.0] * (len(PROMPT) - 1) + (sequence.logprobs or []), np.float32),
                "advantages": np.array([0.0] * (len(PROMPT) - 1) + [1.0] * len(sequence.tokens), np.float32),
                "routed_experts": routes,
            }
            data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
            sampled.append(np.array(sequence.logprobs))
        trained = run.forward_backward(data, "importance_sampling").result(60)
        for output, logprobs in zip(trained.loss_fn_outputs, sampled, strict=True):
            np.testing.assert_allclose(output["logprobs"].to_numpy()[len(PROMPT) - 1 :], logprobs, atol=1e-5)

        inputs = {**data[0].loss_fn_inputs, "routed_experts": np.zeros((3, 1, 1), np.int64)}
        with pytest.raises(weft.RequestFailedError, match=r"routed_experts.*needs \[tokens, mixture layers, choices\]"):
            run.forward_backward([Datum(data[0].model_input, inputs)], "importance_sampling").result(60)
        plain = sampler.sample(ModelInput.from_ints(PROMPT), 1, params).result(60)
        assert plain.sequences[0].routed_experts_np is None
