"""Dimuon against the singular value decomposition; alone and together; saved, resumed, and not mixed with AdamW."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scheduler.links.messages import OpKind
from tests.workers.trainer.kit import Bench, arenas, ce_data, output
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder
from workers.trainer.steps.dimuon import CACHED, Dimuon, DimuonStep, matrices, orthogonal, step_dimuon


def direction(x_NIJ: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x_NIJ.double(), full_matrices=False)
    return (u @ vh).float()


@pytest.mark.parametrize("shape", [(3, 8, 64), (2, 64, 8), (1, 1, 40), (4, 16, 16)])
def test_orthogonal_is_u_v_of_the_svd(shape: tuple[int, int, int]) -> None:
    """Beside matrices whose squares are no float32, too small or too large, and of these."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if shape[1] == shape[2]:  # random square matrices have tiny singular values, where the sign is ill-defined
        x = x + 8 * torch.eye(shape[1])
    x *= torch.logspace(-25, 25, shape[0])[:, None, None]
    torch.testing.assert_close(orthogonal(x), direction(x), atol=2e-5, rtol=0)
    norms = torch.linalg.vector_norm(orthogonal(x), dim=(1, 2))
    torch.testing.assert_close(norms, torch.full_like(norms, min(shape[1:]) ** 0.5), atol=1e-4, rtol=0)


def test_a_small_singular_value_becomes_1_among_many_matrices() -> None:
    x = torch.tensor([1.0, 0.004]).diag().repeat(64, 1, 1)
    torch.testing.assert_close(orthogonal(x), torch.eye(2).repeat(64, 1, 1), atol=1e-4, rtol=0)


def test_orthogonal_of_zero_is_zero() -> None:
    x = torch.zeros(2, 4, 6)
    x[1] = torch.eye(4, 6)
    assert torch.equal(orthogonal(x)[0], torch.zeros(4, 6))


def test_a_matrix_is_one_product_and_one_expert(decoder: Decoder) -> None:
    shape = AdapterShape(decoder.config, rank=4)
    flat = torch.arange(shape.numel, dtype=torch.float32)
    found = dict(zip(shape.slots, matrices(shape, flat), strict=True))
    assert found["layers.0.attn.qkv_A"].shape == (3, 4, 64)
    assert found["layers.0.attn.q_B"].shape == (1, 4, 128)
    assert found["layers.0.mlp.gate_up_A"].shape == (2, 4, 64)
    assert found["layers.0.mlp.gate_B"].shape == found["layers.0.mlp.up_B"].shape == (4, 4, 32)
    assert found["layers.0.mlp.down_A"].shape == (4, 4, 32)


@pytest.mark.parametrize("shared", [True, False])
def test_the_matrices_are_those_of_the_adapter(decoder: Decoder, shared: bool) -> None:
    shape = AdapterShape(decoder.config, rank=4, shared=shared)
    adapter = Adapter(shape, torch.arange(shape.numel, dtype=torch.float32), 1.0)
    for (name, view), found in zip(adapter.views.items(), matrices(shape, adapter.flat), strict=True):
        wanted = view.mT if name.endswith("_B") else view
        assert torch.equal(found.flatten(0, 1), wanted.flatten(0, -2)), name


def fresh(decoder: Decoder, rank: int, seed: int, params: Dimuon) -> DimuonStep:
    shape = AdapterShape(decoder.config, rank)
    weights = Adapter.init(shape, seed).flat
    return DimuonStep(params, shape, weights, torch.zeros_like(weights), torch.zeros_like(weights), 0)


def feed(step: DimuonStep, seed: int) -> DimuonStep:
    noise = torch.randn(step.weights.shape, generator=torch.Generator().manual_seed(seed))
    for view, values in zip(matrices(step.shape, step.grad), matrices(step.shape, noise), strict=True):
        view.copy_(values)
    return step


@pytest.mark.parametrize(("clip", "cached"), [(1.0, CACHED), (0.0, CACHED), (-1.0, 1)])
def test_steps_follow_the_formula(decoder: Decoder, clip: float, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without clipping, and with matrices that are larger than the cache."""
    monkeypatch.setattr("workers.trainer.steps.dimuon.CACHED", cached)
    step = fresh(decoder, 4, 0, Dimuon(0.01, beta1=0.8, grad_clip_norm=clip))
    weights = [w.clone() for w in matrices(step.shape, step.weights)]
    momentum = [torch.zeros_like(w) for w in weights]
    for i in range(3):
        feed(step, 10 + i).grad.mul_(3**i)
        norm = step.grad.norm()
        for w, m, g in zip(weights, momentum, matrices(step.shape, step.grad.clone()), strict=True):
            m.mul_(0.8).add_(g / norm if clip > 0 else g, alpha=0.2)
            w -= 0.01 * direction(m)
        metrics = step_dimuon(step)
        assert metrics["grad_norm:mean"] == pytest.approx(float(norm))
        for got, wanted in zip(matrices(step.shape, step.weights), weights, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-6, rtol=0)


def test_alone_and_together_are_bitwise_equal(make_bench: Callable[..., Bench]) -> None:
    together, alone = make_bench(), make_bench()
    runs = {"a": {"rank": 4}, "b": {"rank": 4}, "c": {"rank": 7}}
    params = {"a": {}, "b": {"beta1": 0.5}, "c": {"grad_clip_norm": 0.1}}
    for bench in (together, alone):
        bench.ok(*(bench.create(run_id, optimizer="dimuon", **kind) for run_id, kind in runs.items()))
        for step in range(3):
            bench.ok(*(bench.fb(run_id, ce_data([9, 5], step)) for run_id in runs))
            ops = [bench.dimuon(run_id, **params[run_id]) for run_id in runs]
            for some in [ops] if bench is together else [[op] for op in ops]:
                bench.ok(*some)
    for run_id in runs:
        for one, other in zip(arenas(together.run(run_id)), arenas(alone.run(run_id)), strict=True):
            assert torch.equal(one, other)


def test_a_run_learns(bench: Bench) -> None:
    bench.ok(bench.create("a", optimizer="dimuon"))
    data = ce_data([20, 12], seed=3)
    for datum in data:
        datum.inputs["weights"][:] = 1
    losses = []
    for _ in range(8):
        op = bench.fb("a", data)
        done = bench.ok(op, bench.dimuon("a", learning_rate=0.02))
        losses.append(output(done[op.op_id])[1]["loss:sum"])
    assert losses[-1] < 0.7 * losses[0]


def test_saved_and_resumed_equals_never_stopped(make_bench: Callable[..., Bench]) -> None:
    worlds = []
    for stops in (False, True):
        bench = make_bench()
        bench.ok(bench.create("a", optimizer="dimuon"))
        for step in range(4):
            bench.ok(bench.fb("a", ce_data([9, 5], seed=step)), bench.dimuon("a"))
            if stops and step == 1:
                save = bench.op("a", OpKind.SAVE_STATE, target_ref="weights/one")
                bench.ok(save)
                bench.restart()
                bench.ok(bench.create("a", optimizer="dimuon", source_ref="weights/one", with_optimizer=True))
        worlds.append(bench.run("a"))
    assert worlds[0].step == worlds[1].step == 4
    for one, other in zip(arenas(worlds[0]), arenas(worlds[1]), strict=True):
        assert torch.equal(one, other)


def test_optimizers_are_not_mixed(bench: Bench) -> None:
    bench.ok(bench.create("muon", optimizer="dimuon"), bench.create("adam"))
    before = [bench.run(run).adapter.flat.clone() for run in ("muon", "adam")]
    wrong = [bench.optim("muon"), bench.dimuon("adam")]
    done = bench.go(*wrong)
    assert [done[op.op_id].failure.message for op in wrong] == [
        "this run's optimizer is dimuon, the step is one of adamw",
        "this run's optimizer is adamw, the step is one of dimuon",
    ]
    assert {done[op.op_id].failure.category for op in wrong} == {"user"}
    for run, flat in zip(("muon", "adam"), before, strict=True):
        assert torch.equal(bench.run(run).adapter.flat, flat)
    bench.ok(bench.op("adam", OpKind.SAVE_STATE, target_ref="weights/adam"))
    load = bench.op("muon", OpKind.LOAD_STATE, source_ref="weights/adam", with_optimizer=True)
    assert "state of the optimizer adamw, the run uses dimuon" in bench.go(load)[load.op_id].failure.message
