"""Uploaded losses, traced by the official SDK and run by us, give what the SDK computes itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch
from weft.wire.checks.batches import BatchRules, batch_problems, refusal
from weft.wire.checks.custom_format import CustomLoss, encode_custom_loss
from weft.wire.checks.losses import CUSTOM, WITH_CUSTOM

from scheduler.links.messages import OpKind, loss_ref
from tests.workers.trainer.graphs import stored
from tests.workers.trainer.kit import Bench, ce_data, multi_data, output, rl_data
from workers.trainer.losses.custom_graph import run_custom_loss


def clipped(logprobs, advantages, q):
    ratio = torch.exp(logprobs - q)
    loss = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages).sum()
    outside = ((ratio < 0.8) | (ratio > 1.2)).float()
    return loss, {"custom/clip:mean": outside.mean(), "custom/loss:sum": loss}


def shapes_and_slices(logprobs, advantages, q):
    n = logprobs.shape[0]
    best = logprobs.max(dim=0)[0] + torch.sort(q, descending=True)[0][:2].sum()
    ramp = torch.arange(n, dtype=torch.float32) / max(1, 3) + torch.zeros_like(q) + logprobs.new_zeros(n)
    steps = (logprobs[1:] - logprobs[:-1]).square().sum() + logprobs[..., None].sum() + (ramp * logprobs).mean()
    return best + steps * math.sqrt(2.0) + math.log(n), {"custom/n:sum": torch.ones_like(q).sum()}


def mask_and_mean(logprobs, advantages, q):
    chosen = advantages > 0
    ratio = (logprobs - q)[chosen].mean().exp()
    kept = torch.where(chosen, logprobs, torch.full_like(q, -float("inf")))
    return -ratio - torch.logsumexp(kept, dim=0), {"custom/ratio:mean": ratio}


def functional(logprobs, advantages, q):
    terms = F.softplus(logprobs) - F.logsigmoid(q - logprobs) + F.silu(logprobs) + F.gelu(logprobs)
    joined = torch.cat([terms, F.relu(logprobs + 2)]) + torch.stack([q, advantages]).reshape(-1)
    smooth = F.huber_loss(logprobs, q, reduction="sum") + F.smooth_l1_loss(logprobs, q)
    return joined.sum() + smooth + abs(-logprobs).pow(1.5).to(torch.float64).float().sum(), {}


def two_ranks(logprobs, weights):
    return -(torch.log_softmax(logprobs, dim=-1) * weights).sum(), {"custom/k:mean": logprobs.exp().sum(-1).mean()}


LOSSES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    **{
        fn.__name__: (fn, {"logprobs": 1, "advantages": 1, "q": 1})
        for fn in (clipped, shapes_and_slices, mask_and_mean, functional)
    },
    "two_ranks": (two_ranks, {"logprobs": 2, "weights": 2}),
}


def traced(name: str) -> tuple[LossHandle, CustomLoss]:
    fn, ranks = LOSSES[name]
    handle = trace_loss(fn, ranks, "session")
    return handle, stored(handle)


@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_clients_own_run(name: str) -> None:
    handle, loss = traced(name)
    shape = (7, 3) if name == "two_ranks" else (7,)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=generator) for _ in loss.inputs]
    logprobs = [-inputs[0].abs().requires_grad_() for _ in range(2)]
    for lp in logprobs:
        lp.retain_grad()
    wanted, wanted_metrics = handle.graph(logprobs[0], *inputs[1:])
    got, metrics = run_custom_loss(loss, [logprobs[1], *inputs[1:]])
    wanted.backward()
    got.backward()
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(logprobs[1].grad, logprobs[0].grad)
    assert metrics == pytest.approx({key: float(value.detach()) for key, value in wanted_metrics.items()})


def test_a_run_trained_with_an_uploaded_ppo_is_the_run_trained_with_ppo(make_bench: Callable[..., Bench]) -> None:
    handle, _ = traced("clipped")
    grads = []
    for name in ("ppo", "custom"):
        bench = make_bench(microbatch_tokens=16)
        upload(bench, handle, "s:loss:0")
        bench.ok(bench.create("a"))
        data = rl_data([9, 14, 3], seed=1)
        for datum in data:
            datum.inputs["advantages"][0] = 0.5
            if name == "custom":
                datum.inputs["q"] = datum.inputs["logprobs"]
        config = {"loss_id": "s:loss:0"} if name == "custom" else {}
        op = bench.fb("a", data, name, **config)
        _, metrics = output(bench.ok(op)[op.op_id])
        grads.append((bench.run("a").grad.flat, metrics["loss:sum"]))
        if name == "custom":
            assert metrics["custom/loss:sum"] == pytest.approx(metrics["loss:sum"])
            assert 0 < metrics["custom/clip:mean"] <= 1
    torch.testing.assert_close(grads[0][0], grads[1][0], atol=1e-6, rtol=1e-5)
    assert grads[0][1] == pytest.approx(grads[1][1], rel=1e-5)


def upload(bench: Bench, handle: LossHandle, loss_id: str) -> None:
    graph = encode_graph(handle).model_dump()
    pairs = [(item.name, item.rank) for item in handle.inputs]
    bench.blobs.put(loss_ref(loss_id), encode_custom_loss(handle.name, pairs, graph))


def test_a_loss_that_fails_while_it_runs_is_its_users_error_and_leaves_others_alone(bench: Bench) -> None:
    def shape_mismatch(logprobs, q):
        return (logprobs[1:] * q).sum(), {}

    upload(bench, trace_loss(shape_mismatch, {"logprobs": 1, "q": 1}, "s"), "s:loss:0")
    bench.ok(bench.create("a"), bench.create("b"))
    bad = ce_data([9], seed=1)
    bad[0].inputs["q"] = np.ones(9, np.float32)
    ops = [bench.fb("a", bad, "custom", loss_id="s:loss:0"), bench.fb("b", ce_data([5], seed=2))]
    done = bench.go(*ops)
    assert done[ops[0].op_id].failure.category == "user"
    # It was computed, and is billed. What is wrong is known before anything of it runs.
    assert done[ops[0].op_id].facts == {"tokens": 9}
    assert "datum 0: " in done[ops[0].op_id].failure.message
    assert "node mul (operator.mul): shapes [8] and [9] do not fit" in done[ops[0].op_id].failure.message
    assert done[ops[1].op_id].failure is None
    assert bench.run("a").grad is None


def detached(logprobs, advantages, q):
    return logprobs.detach().sum(), {}


def of_the_data(logprobs, advantages, q):
    return (advantages * q).sum(), {}


def of_an_index(logprobs, advantages, q):
    return logprobs.argmax().float(), {}


@pytest.mark.parametrize("fn", [detached, of_the_data, of_an_index])
def test_a_loss_without_a_gradient_is_named(bench: Bench, fn: Callable[..., Any]) -> None:
    """Such a loss would train nothing, and its user would not notice."""
    upload(bench, trace_loss(fn, {"logprobs": 1, "advantages": 1, "q": 1}, "s"), "s:loss:0")
    data = rl_data([5], seed=1)
    data[0].inputs["q"] = data[0].inputs["logprobs"]
    bad = bench.fb("a", data, "custom", loss_id="s:loss:0")
    bench.ok(bench.create("a"))
    failure = bench.go(bad)[bad.op_id].failure
    assert failure is not None
    assert failure.category == "user"
    assert f"{fn.__name__!r} does not depend on the logprobs: it has no gradient" in failure.message


def test_a_forward_and_several_targets(bench: Bench) -> None:
    handle, _ = traced("two_ranks")
    upload(bench, handle, "s:loss:1")
    bench.ok(bench.create("a"))
    data = multi_data([4, 6], seed=1)
    op = bench.fb("a", data, "custom", kind=OpKind.FORWARD, loss_id="s:loss:1")
    logprobs, metrics = output(bench.ok(op)[op.op_id])
    wanted = [
        handle.graph(torch.from_numpy(lp), torch.from_numpy(d.inputs["weights"]))
        for lp, d in zip(logprobs, data, strict=True)
    ]
    assert metrics["loss:sum"] == pytest.approx(sum(float(loss) for loss, _ in wanted), rel=1e-5)
    mean = sum(float(m["custom/k:mean"]) for _, m in wanted) / 2
    assert metrics["custom/k:mean"] == pytest.approx(mean, rel=1e-5)


def test_data_must_have_what_the_loss_reads() -> None:
    _, loss = traced("clipped")
    good = {"target_tokens": np.ones(3, np.int64), "advantages": np.ones(3), "q": np.ones(3), "mask": np.ones(3)}

    def said(*data: dict[str, Any]) -> str:
        made = [ArrayDatum(np.ones(3, np.int32), inputs) for inputs in data]
        batch = TrainBatch("r", 1, CUSTOM, {"loss_id": "s:loss:0"}, data=made)
        return "; ".join(refusal(found) for found in batch_problems(batch, BatchRules(WITH_CUSTOM, reads=loss.reads)))

    assert said(good, good | {"mask": np.array([np.nan])}) == "", "what the loss does not read may be anything"
    for change, words in (
        ({"q": np.ones((3, 2))}, "declared rank 1"),
        ({"q": np.array([1.0, np.nan, 1.0])}, "'q' is nan at element 1; it must be finite"),
        ({"target_tokens": np.ones((3, 2), np.int64)}, "'target_tokens' has shape"),
    ):
        assert said(good, good | change).startswith("datum 1: ")
        assert words in said(good, good | change)
    lacking = {k: v for k, v in good.items() if k != "q"}
    assert said(lacking) == f"datum 0: the loss 'clipped' reads 'q'; it has {sorted(lacking)}"
