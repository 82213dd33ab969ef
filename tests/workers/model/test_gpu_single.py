"""The products of decode steps, row by row, against sums written out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.workers.model.gpu_kit import CONFIG, DEVICE, adapter
from workers.model.adapters.adapter import Adapter
from workers.model.gpu.segments import forms, rewritable
from workers.model.gpu.single import SingleProducts
from workers.model.lora.rows import LoraRows
from workers.model.routing import Routing

QKV = "layers.0.attn.qkv_A"
OF_QKV = [
    (f"layers.0.attn.{name}_B", size)
    for name, size in zip("qkv", (CONFIG.q_size, CONFIG.kv_size, CONFIG.kv_size), strict=True)
]
OF_INNER = [(f"layers.0.mlp.{name}_B", CONFIG.moe_intermediate_size) for name in ("gate", "up")]
DOWN = "layers.0.mlp.down_A"


def crowd() -> list[Adapter | None]:
    """Adapters of ranks that are summed in one go and in several, and of different targets; and a row without one."""
    other = adapter(CONFIG, 7, 3, train_attn=False)
    return [adapter(CONFIG, 3, 0), None, adapter(CONFIG, 20, 1), adapter(CONFIG, 130, 2), other, adapter(CONFIG, 8, 4)]


def loaded(adapters: Sequence[Adapter | None]) -> tuple[LoraRows, SingleProducts]:
    """The rows and products of a decode step that is loaded with these adapters."""
    rows, table = rewritable(forms(adapters), len(adapters), DEVICE)
    table.rewrite(LoraRows(range(len(adapters) + 1), adapters))
    return rows, SingleProducts(table)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def linear(adapters: Sequence[Adapter | None], x: Tensor) -> Tensor:
    """The output of a fused linear whose base gives ones."""
    _, products = loaded(adapters)
    y = x.new_ones(len(x), sum(size for _, size in OF_QKV))
    products.add(y, x, products.room(x, 3), QKV, OF_QKV, scaled=True)
    return y


def close(found: Tensor, wanted: Sequence[Tensor]) -> None:
    torch.testing.assert_close(found, torch.stack([*wanted]), atol=1e-4, rtol=1e-4)


def test_a_linear_of_several_parts() -> None:
    adapters, x, wanted = crowd(), random(6, CONFIG.hidden_size, seed=0), []
    for of, x_I in zip(adapters, x, strict=True):
        y = x.new_ones(sum(size for _, size in OF_QKV))
        if of is not None and QKV in of.views:
            parts = zip((of.views[QKV] @ x_I).split(of.rank), OF_QKV, strict=True)
            y += of.scale * torch.cat([of.views[name] @ u for u, (name, _) in parts])
        wanted.append(y)
    close(linear(adapters, x), wanted)


def test_more_parts_than_one_launch_takes() -> None:
    adapters, parts = [adapter(CONFIG, 8, 0), adapter(CONFIG, 20, 1)], [*OF_QKV, *OF_QKV[::-1]]
    _, products = loaded(adapters)
    u, y = random(2, 6 * products.max_rank, seed=0), torch.zeros(2, 2 * sum(n for _, n in OF_QKV), device=DEVICE)
    products.add(y, None, u, "", parts, scaled=False)
    each = ((of, u_I[: 6 * of.rank].split(of.rank)) for of, u_I in zip(adapters, u, strict=True))
    close(y, [torch.cat([of.views[name] @ v for v, (name, _) in zip(vs, parts, strict=True)]) for of, vs in each])


def test_pairs_have_the_factors_of_their_expert() -> None:
    adapters, chosen = crowd(), torch.tensor([[0, 4], [1, 2], [4, 1], [2, 0], [3, 4], [4, 2]], device=DEVICE)
    rows, products = loaded(adapters)
    routing = Routing(chosen, CONFIG.num_experts)
    paired, pairs, f = products.experts(routing, rows), len(routing.order), CONFIG.moe_intermediate_size
    u, h = random(pairs, 2 * products.max_rank, seed=0), random(pairs, f, seed=1)
    y, v = torch.zeros(pairs, 2 * f, device=DEVICE), torch.zeros(pairs, products.max_rank, device=DEVICE)
    paired.add(y, None, u, "", OF_INNER, scaled=False)
    paired.shrink(h, v, DOWN, scaled=False)
    wanted_y, wanted_v = torch.zeros_like(y), torch.zeros_like(v)
    for pair, (token, expert) in enumerate(zip(routing.token.tolist(), routing.experts.tolist(), strict=True)):
        of = adapters[token]
        if of is not None:
            both = zip(OF_INNER, u[pair, : 2 * of.rank].split(of.rank), strict=True)
            wanted_y[pair] = torch.cat([of.views[name][expert] @ u_R for (name, _), u_R in both])
            wanted_v[pair, : of.rank] = of.views[DOWN][expert] @ h[pair]
    close(y, [*wanted_y])
    close(v, [*wanted_v])


@pytest.mark.parametrize("row", [0, 2, 5])
def test_a_row_is_the_same_alone_and_among_others(row: int) -> None:
    """It has the same bits, whatever the largest rank of the batch."""
    adapters, x = crowd(), random(6, CONFIG.hidden_size, seed=0)
    assert torch.equal(linear(adapters, x)[row], linear([adapters[row]], x[row : row + 1])[0])
