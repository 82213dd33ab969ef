"""Rollout routing replay through the API, with our own client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import weft
from weft import rl
from weft.types import Datum, ModelInput, SamplingParams

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.data import off

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
            computed = output["logprobs"].to_numpy()[len(PROMPT) - 1 :]
            np.testing.assert_allclose(computed, logprobs, atol=off(1e-5, 1e-4))

        inputs = {**data[0].loss_fn_inputs, "routed_experts": np.zeros((3, 1, 1), np.int64)}
        with pytest.raises(weft.RequestFailedError, match=r"routed_experts.*needs \[tokens, mixture layers, choices\]"):
            run.forward_backward([Datum(data[0].model_input, inputs)], "importance_sampling").result(60)
        plain = sampler.sample(ModelInput.from_ints(PROMPT), 1, params).result(60)
        assert plain.sequences[0].routed_experts_np is None


#: Python code that runs before the program that forks workers. It alters the routers' scores in the generator only, as
#: rounding might. A token always gets the same alteration, so when a later turn reads it again it goes to the same
#: experts.
NOISY_ROUTERS = """
import sys

if sys.orig_argv[-3:-2] == ["nursery"]:
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    noise_E = None

    def choose(module, given):
        global noise_E
        if type(module).__name__ != "Router" or open("/proc/self/comm").read().strip() != "weft-generator":
            return None
        (x_TD, lora, forced), weight_ED = given, module.weight
        if noise_E is None:  # sent once, before a step is captured: a CUDA graph waits for no copy
            noise_E = torch.randn(len(weight_ED), generator=torch.Generator().manual_seed(1)).to(weight_ED.device)
        logits_TE = x_TD.to(weight_ED.dtype) @ weight_ED.T
        return x_TD, lora, torch.topk(logits_TE + 0.2 * noise_E, module.choices, dim=-1).indices

    register_module_forward_pre_hook(choose)
"""


def test_a_loop_that_replays_is_on_policy_whatever_the_samplers_routers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where turns extend each other, and where answers end early."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NOISY_ROUTERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    async def solve(task: str, chat: rl.Chat) -> float:
        first = await chat.user(task).sample(max_tokens=12, stop=[])
        again = await chat.user("Again.").sample(max_tokens=12, stop=[], prune=lambda ids: len(ids) > 4)
        return len(set(first.turn.tokens + again.turn.tokens)) / 24

    env = rl.function(solve, ["What is 3 + 4?", "What is 5 + 2?"])
    server = Weftd(tmp_path / "weftd").start()
    try:
        with weft.ServiceClient(base_url=server.url, api_key=server.key("replay")) as service:
            first = {}
            for replay in (False, True):
                run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5)
                report = rl.train(run, env, steps=2, groups=rl.Groups(2, 4), sinks=[], routing_replay=replay)
                first[replay] = report.curve("mismatch_kl")
                assert report.curve("turns/rollout") == [2, 2]
    finally:
        assert server.stop() == 0, server.log()
    assert min(first[False]) > 1e-4
    assert max(map(abs, first[True])) < 1e-8
