"""Whole training steps against transformers' own model, local autograd and torch.optim.AdamW; and against peft."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from weft.wire.checks.losses import LOSSES

from tests.workers.model.lora.test_linear import merged
from tests.workers.model.models import ours, reference
from tests.workers.trainer.kit import Bench, ce_data, multi_data, output, rl_data
from workers.model.adapters.adapter import Adapter
from workers.trainer.losses.named import LOSS_FUNCTIONS

STEPS = 5
ADAM = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


class Alone:
    """Trains one run locally: autograd through merged weights, torch.optim.AdamW."""

    def __init__(self, model: Any, start: Adapter) -> None:
        self.model, self.start = model, start
        self.initial = start.flat.clone()
        self.flat = start.flat.clone().requires_grad_()
        self.optimizer = torch.optim.AdamW(
            [self.flat], lr=ADAM["learning_rate"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )

    def step(self, data: list[Any], loss_fn: str, clip: float, learning_rate: float) -> list[Tensor]:
        weights = merged(self.model, Adapter(self.start.shape, self.flat, self.start.scale))
        seen, total = [], torch.zeros(())
        for datum in data:
            tokens = torch.from_numpy(datum.tokens).long()[None]
            logits = torch.func.functional_call(self.model, weights, (tokens,), tie_weights=False).logits[0]
            targets = torch.from_numpy(datum.inputs["target_tokens"]).view(len(datum.tokens), -1)
            lp = torch.log_softmax(logits, -1).gather(1, targets)
            inputs = {k: torch.from_numpy(v).view(-1) for k, v in datum.inputs.items() if k != "target_tokens"}
            total = total + LOSS_FUNCTIONS[loss_fn](lp.view(-1), inputs, {})[0]
            seen.append(lp.detach().view(datum.inputs["target_tokens"].shape))
        self.optimizer.zero_grad()
        total.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([self.flat], clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return seen


#: Run -> (loss, its data, rank, clipping).
RUNS: dict[str, tuple[str, Any, int, float]] = {
    "one-target": ("cross_entropy", ce_data, 4, 1.0),
    "three-targets": ("cross_entropy", multi_data, 3, 0.0),
    **{loss: (loss, rl_data, 4 + i, 0.5 * i) for i, loss in enumerate(sorted(set(LOSSES) - {"cross_entropy"}))},
}


def test_runs_of_every_loss_in_shared_passes_equal_local_training(model: Any, bench: Bench) -> None:
    """Weight decay, clipping in some runs, and another learning rate in every step."""
    bench.ok(*(bench.create(run, rank) for run, (_, _, rank, _) in RUNS.items()))
    alone = {run: Alone(model, bench.run(run).adapter) for run in RUNS}
    for step in range(STEPS):
        rate = ADAM["learning_rate"] * (1 - 0.15 * step)
        data = {run: make([8, 25, 3], seed=100 * step + i) for i, (run, (_, make, _, _)) in enumerate(RUNS.items())}
        works = {run: bench.fb(run, data[run], RUNS[run][0]) for run in RUNS}
        steps = [bench.optim(run, **ADAM | {"grad_clip_norm": RUNS[run][3], "learning_rate": rate}) for run in RUNS]
        done = bench.ok(*works.values(), *steps)
        for run, op in works.items():
            wanted = alone[run].step(data[run], RUNS[run][0], RUNS[run][3], rate)
            for got, expected in zip(output(done[op.op_id])[0], wanted, strict=True):
                torch.testing.assert_close(torch.from_numpy(got), expected, atol=1e-4, rtol=0)
    for run, local in alone.items():
        torch.testing.assert_close(bench.run(run).adapter.flat, local.flat.detach(), atol=1e-4, rtol=0)
        assert (local.flat.detach() - local.initial).abs().max() > 50 * 1e-4


@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_two_calls_equal_one(loss_fn: str, make_bench: Any) -> None:
    """Gradient accumulation: 2N data at once, or N and N."""
    data = (ce_data if loss_fn == "cross_entropy" else rl_data)([9, 14, 3, 20], seed=5)
    worlds = []
    for cuts in ([data], [data[:2], data[2:]]):
        bench = make_bench()
        bench.ok(bench.create("a"))
        bench.ok(*(bench.fb("a", part, loss_fn) for part in cuts))
        grad = bench.run("a").grad.flat.clone()
        bench.ok(bench.optim("a", **ADAM))
        worlds.append((grad, bench.run("a").adapter.flat))
    for one, two in zip(*worlds, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


def test_attention_only_run_equals_peft(tmp_path: Any) -> None:
    model = reference("qwen3")
    bench = Bench(ours(model, tmp_path / "model"), tmp_path / "blobs")
    bench.ok(bench.create("a", rank=4, train_mlp=False, train_unembed=False))
    adapter = bench.run("a").adapter
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    pairs: list[tuple[Tensor, Tensor]] = []
    for layer in range(bench.decoder.config.num_layers):
        at = f"layers.{layer}.attn."
        for i, part in enumerate("qkvo"):
            module = peft_model.get_submodule(f"base_model.model.model.layers.{layer}.self_attn.{part}_proj")
            a = adapter.view(at + "o_A") if part == "o" else adapter.view(at + "qkv_A")[4 * i : 4 * i + 4]
            pairs += [
                (module.lora_A["default"].weight, a),
                (module.lora_B["default"].weight, adapter.view(f"{at}{part}_B")),
            ]
    for theirs, start in pairs:
        theirs.data.copy_(start)
    optimizer = torch.optim.AdamW(
        [theirs for theirs, _ in pairs], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for step in range(STEPS):
        data = ce_data([17, 6], seed=step)
        op = bench.fb("a", data)
        done = bench.ok(op, bench.optim("a", **ADAM))
        loss = torch.zeros(())
        for datum, got in zip(data, output(done[op.op_id])[0], strict=True):
            logits = peft_model(torch.from_numpy(datum.tokens).long()[None]).logits[0]
            lp = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(datum.inputs["target_tokens"])[:, None])[:, 0]
            np.testing.assert_allclose(got, lp.detach().numpy(), atol=1e-4)
            loss = loss - (lp * torch.from_numpy(datum.inputs["weights"])).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for theirs, mine in pairs:
        torch.testing.assert_close(mine, theirs.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("loss_fn", sorted(set(LOSSES) - {"cross_entropy"}))
def test_on_policy_rl_gradients_agree(loss_fn: str, bench: Bench) -> None:
    """With q = lp every RL loss has the policy gradient of cross entropy weighted by the advantages."""
    bench.ok(bench.create("a"))
    data = ce_data([9, 14], seed=1)
    forward = bench.fb("a", data)
    logprobs, _ = output(bench.ok(forward)[forward.op_id])
    wanted = bench.run("a").grad.flat.clone()
    bench.run("a").has_grad = False
    for datum, q in zip(data, logprobs, strict=True):
        datum.inputs["advantages"] = datum.inputs.pop("weights")
        datum.inputs["logprobs"] = q
        datum.inputs["sequence_ratio_mask"] = np.ones_like(q)
    op = bench.fb("a", data, loss_fn)
    _, metrics = output(bench.ok(op)[op.op_id])
    torch.testing.assert_close(bench.run("a").grad.flat, wanted, atol=1e-5, rtol=1e-4)
    assert metrics["mismatch_kl:mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["ratio:mean"] == pytest.approx(1.0)
