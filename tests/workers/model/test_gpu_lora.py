"""The CUDA path of linears and experts against the CPU path, kernel by kernel through autograd. Also on a GPU the
reference is computed in the host's memory by the CPU's code, never by the kernels that are tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.workers.model.gpu_kit import (
    CONFIG,
    DENSE,
    DEVICE,
    HOST,
    adapter,
    assert_same_grads,
    gradient,
    mixed_rows,
    twice,
)
from workers.model.config import GateConfig
from workers.model.gpu import launch
from workers.model.lora import products as lora_products
from workers.model.lora.linear import Site, lora_linear
from workers.model.lora.rows import LoraRows
from workers.model.mixture.experts import Experts, Names, expert_block
from workers.model.owned.exchange import Exchange
from workers.model.owned.layer import OfLayer
from workers.model.owned.owner import Owner

QKV = Site(
    "layers.0.attn.qkv_A",
    ("layers.0.attn.q_B", "layers.0.attn.k_B", "layers.0.attn.v_B"),
    (DENSE.q_size, DENSE.kv_size, DENSE.kv_size),
)
DOWN = Site("layers.0.mlp.down_A", ("layers.0.mlp.down_B",), (DENSE.hidden_size,))
NAMES = Names.at("layers.0.mlp.", GateConfig())

#: The base is rounded alike in both, so only sums in float32 differ. On CUDA sums are in TF32, and a base in bfloat16
#: rounds their results.
TOLERANCE = 1e-5 if DEVICE == HOST else 2e-3
ROUNDED = TOLERANCE if DEVICE == HOST else 2e-2
TOLERANCES = {torch.float32: TOLERANCE, torch.bfloat16: ROUNDED}


@dataclass(frozen=True)
class Side:
    """The place of a computation: `OURS` has the adapters' products in Triton, on a device or in the interpreter;
    `THEIRS` those of the CPU."""

    device: torch.device
    triton: bool

    def run(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lora_products, "on_device", lambda weight: self.triton)
            return function(*args)

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device)


OURS, THEIRS = Side(DEVICE, triton=True), Side(HOST, triton=False)


def close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    assert wanted.device == HOST, "the reference is the CPU's"
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    error = (found.cpu() - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance, f"differs by {float(error):.1e}"


def through(side: Side, site: Site, rows: LoraRows, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Output and input gradient of a linear."""
    inner = {QKV.a: DENSE.hidden_size, DOWN.a: DENSE.intermediate_size}[site.a]
    weight = (0.2 * side.random(sum(site.sizes), inner, seed=1)).to(dtype)
    x = side.random(len(rows), inner, seed=2).requires_grad_()
    y = side.run(lora_linear, x, weight, site, rows)
    side.run(y.backward, side.random(*y.shape, seed=3))
    assert x.grad is not None
    return y.detach(), x.grad


def test_the_reference_is_computed_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine: otherwise kernels would be compared with themselves."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("the reference went through the kernels")

    monkeypatch.setattr(launch.TritonProducts, "dense", refuse)
    _, theirs = twice(mixed_rows(DENSE))
    through(THEIRS, QKV, theirs)
    _, theirs = twice(mixed_rows(CONFIG))
    block(THEIRS, theirs, torch.float32, len(theirs))
    ours, _ = twice(mixed_rows(DENSE))
    with pytest.raises(AssertionError, match="through the kernels"):
        through(OURS, QKV, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("site", [QKV, DOWN], ids=["qkv", "down"])
def test_linear_is_that_of_the_cpu(site: Site, dtype: torch.dtype) -> None:
    ours, theirs = twice(mixed_rows(DENSE))
    y, dx = through(OURS, site, ours, dtype)
    wanted_y, wanted_dx = through(THEIRS, site, theirs, dtype)
    close(y, wanted_y, TOLERANCES[dtype])
    close(dx, wanted_dx, TOLERANCES[dtype])
    assert_same_grads(ours.grads, theirs.grads, TOLERANCE)


def test_an_input_in_16_bits_gets_its_gradient_in_them() -> None:
    """Attention's output is such an input. Compared with the same numbers in float32."""
    ours, theirs = twice(mixed_rows(DENSE))
    weight = (0.2 * THEIRS.random(DENSE.hidden_size, DENSE.intermediate_size, seed=1)).to(torch.bfloat16)
    x, dy = (THEIRS.random(len(ours), wide, seed=2) for wide in (DENSE.intermediate_size, DENSE.hidden_size))
    gradients = []
    for side, rows, dtype in ((OURS, ours, torch.bfloat16), (THEIRS, theirs, torch.float32)):
        own = x.to(torch.bfloat16).to(side.device, dtype, copy=True).requires_grad_()
        y = side.run(lora_linear, own, weight.to(side.device), DOWN, rows)
        side.run(y.backward, dy.to(side.device, y.dtype))
        assert own.grad is not None
        assert own.grad.dtype == dtype
        gradients.append(own.grad.float())
    close(gradients[0], gradients[1], 1e-2)
    assert_same_grads(ours.grads, theirs.grads, 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_alone_is_that_with_gradients(dtype: torch.dtype) -> None:
    rows, weight = mixed_rows(DENSE), (0.2 * OURS.random(sum(QKV.sizes), DENSE.hidden_size)).to(dtype)
    x = OURS.random(len(rows), DENSE.hidden_size)
    recorded = OURS.run(lora_linear, x, weight, QKV, rows)
    with torch.inference_mode():
        plain = OURS.run(lora_linear, x, weight, QKV, rows)
    assert torch.equal(plain, recorded.detach())


def test_groups_without_the_tensor_get_the_base() -> None:
    only_mlp = adapter(DENSE, 4, 0, train_attn=False)
    rows = LoraRows([0, 5, 9], [only_mlp, None])
    weight, x = OURS.random(sum(QKV.sizes), DENSE.hidden_size), OURS.random(9, DENSE.hidden_size)
    close(OURS.run(lora_linear, x, weight, QKV, rows), x.cpu() @ weight.cpu().t())


def test_rank_beyond_one_block() -> None:
    wide = adapter(DENSE, 130, 0)
    ours, theirs = twice(LoraRows([0, 20], [wide], [gradient(wide, 0)]))
    y, dx = through(OURS, DOWN, ours)
    wanted_y, wanted_dx = through(THEIRS, DOWN, theirs)
    close(y, wanted_y)
    close(dx, wanted_dx)
    assert_same_grads(ours.grads, theirs.grads, TOLERANCE)


def test_long_sums_are_split_at_fixed_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_SPLIT", 64)
    monkeypatch.setattr(launch, "SHRINK", launch.SHRINK._replace(columns=64))
    ours, theirs = twice(mixed_rows(DENSE))
    y, dx = through(OURS, DOWN, ours)
    wanted_y, wanted_dx = through(THEIRS, DOWN, theirs)
    close(y, wanted_y)
    close(dx, wanted_dx)
    assert_same_grads(ours.grads, theirs.grads, TOLERANCE)


def block(
    side: Side, rows: LoraRows | None, dtype: torch.dtype, tokens: int, crowd: bool = False, own: bool = False
) -> list[Tensor]:
    """Output, input gradient and router gradient of an expert block; in a `crowd` all tokens choose two experts. If
    experts are `own`ed, this process is the only owner, and sends pairs to itself."""
    e, f, d, k = CONFIG.num_experts, CONFIG.moe_intermediate_size, CONFIG.hidden_size, CONFIG.experts_per_token
    gate_up, down = ((0.2 * side.random(*shape, seed=n)).to(dtype) for n, shape in ((1, (e, 2 * f, d)), (2, (e, d, f))))
    scores = THEIRS.random(tokens, e, seed=3)  # both choose the same experts
    if crowd:
        scores[:, [1, 4]] += 100
    weights, experts = torch.topk(torch.softmax(scores, -1), k, dim=-1)
    x, weights = side.random(tokens, d, seed=4).requires_grad_(), weights.to(side.device).requires_grad_()
    there = Experts(gate_up, down)
    if own:
        control = dist.new_group(backend="gloo") if side.device.type == "cuda" else None
        exchange = Exchange(CONFIG, {0: Owner(there, NAMES)}, control)
        exchange.begin(rows, recomputes=False)
        there = there._replace(away=OfLayer(exchange, 0, e, stack=2))
    out = side.run(expert_block, x, weights, experts.to(side.device), there, NAMES, rows)
    side.run(out.backward, side.random(*out.shape, seed=5))
    assert x.grad is not None
    assert weights.grad is not None
    return [out.detach(), x.grad, weights.grad]


@pytest.mark.parametrize("crowd", [False, True], ids=["spread", "crowded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_are_those_of_the_cpu(dtype: torch.dtype, crowd: bool) -> None:
    ours, theirs = twice(mixed_rows(CONFIG))
    tolerance = TOLERANCE if dtype == torch.float32 else 2e-2  # rows of one expert round apart in bfloat16
    found = block(OURS, ours, dtype, len(ours), crowd)
    for mine, wanted in zip(found, block(THEIRS, theirs, dtype, len(theirs), crowd), strict=True):
        close(mine, wanted, tolerance)
    assert_same_grads(ours.grads, theirs.grads, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_owned_experts_are_those_of_one_process(dtype: torch.dtype, alone: None) -> None:
    """They have the same bits, as both use the same kernels."""
    ours, again = twice(mixed_rows(CONFIG))[0], twice(mixed_rows(CONFIG))[0]
    found, wanted = block(OURS, ours, dtype, len(ours), own=True), block(OURS, again, dtype, len(again))
    for mine, other in zip(found, wanted, strict=True):
        assert torch.equal(mine, other)
    arenas = [[grad.flat for grad in rows.grads if grad is not None] for rows in (ours, again)]
    assert all(torch.equal(mine, other) for mine, other in zip(*arenas, strict=True))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_experts_that_share_nothing_are_those_of_the_cpu() -> None:
    """In one batch with experts that share factors."""
    adapters = [adapter(CONFIG, 4, 0, shared=False), adapter(CONFIG, 20, 1), adapter(CONFIG, 7, 2, shared=False)]
    rows = LoraRows([0, 5, 14, 20], adapters, [gradient(of, seed) for seed, of in enumerate(adapters)])
    ours, theirs = twice(rows)
    found, wanted = (block(side, rows, torch.float32, 20) for side, rows in ((OURS, ours), (THEIRS, theirs)))
    for mine, other in zip(found, wanted, strict=True):
        close(mine, other)
    assert_same_grads(ours.grads, theirs.grads, TOLERANCE)


def test_experts_without_adapters() -> None:
    for mine, wanted in zip(
        block(OURS, None, torch.float32, 12),
        block(THEIRS, None, torch.float32, 12),
        strict=True,
    ):
        close(mine, wanted)


def test_a_group_is_the_same_alone_and_among_others() -> None:
    """The low-rank kernels give it the same bits: a tile holds rows of one run, and no sum is split."""
    rows = mixed_rows(CONFIG)
    start, stop = rows.offsets[2], rows.offsets[3]
    crowd, _ = twice(rows)
    alone, _ = twice(LoraRows([0, stop - start], [rows.adapters[2]], [rows.grads[2]]))
    weight = torch.zeros(sum(QKV.sizes), CONFIG.hidden_size, device=DEVICE)
    x, dy = OURS.random(len(rows), CONFIG.hidden_size), OURS.random(len(rows), sum(QKV.sizes))
    outputs = []
    for of, part in ((crowd, slice(None)), (alone, slice(start, stop))):
        leaf = x[part].clone().requires_grad_()
        y = OURS.run(lora_linear, leaf, weight, QKV, of)
        OURS.run(y.backward, dy[part])
        assert leaf.grad is not None
        outputs.append((y.detach(), leaf.grad))
    (y, dx), (own_y, own_dx) = outputs
    assert torch.equal(y[start:stop], own_y)
    assert torch.equal(dx[start:stop], own_dx)
    assert crowd.grads[2] is not None
    assert alone.grads[0] is not None
    assert torch.equal(crowd.grads[2].flat, alone.grads[0].flat)
