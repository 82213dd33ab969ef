"""What a decode step computes in one call: the numbers of the formulas, and bits that no neighbour can change."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.model.gpu_kit import CONFIG, adapter
from workers.model.lora.linear import Site, lora_linear
from workers.model.lora.rows import LoraRows
from workers.model.mixture.experts import Experts, Names, expert_block
from workers.model.native import build, gemm, joined
from workers.model.native.launch import NativeProducts
from workers.model.parts.rotary import turn

RANKS = (4, 1, 9, None, 3, 9)
SIZES = (5, 1, 0, 2, 33, 1)
QKV = Site("layers.0.attn.qkv_A", ("layers.0.attn.q_B", "layers.0.attn.k_B"), (CONFIG.q_size, CONFIG.kv_size))
NAMES = Names.at("layers.0.mlp.", CONFIG.gate)


@pytest.fixture(autouse=True)
def in_inference() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(groups: range = range(len(RANKS))) -> LoraRows:
    adapters = [None if (rank := RANKS[g]) is None else adapter(CONFIG, rank, g) for g in groups]
    return LoraRows(torch.tensor([0, *(SIZES[g] for g in groups)]).cumsum(0).tolist(), adapters)


ROWS = sum(SIZES)
X = numbers(ROWS, CONFIG.hidden_size, seed=1)
QKV_WEIGHT = torch.nn.Parameter(numbers(CONFIG.q_size + CONFIG.kv_size + 3, CONFIG.hidden_size, seed=2) * 0.1, False)
WIDTH, COUNT = CONFIG.moe_intermediate_size, CONFIG.num_experts
GATE_UP = torch.nn.Parameter(numbers(COUNT, 2 * WIDTH, CONFIG.hidden_size, seed=3) * 0.2, False)
DOWN = torch.nn.Parameter(numbers(COUNT, CONFIG.hidden_size, WIDTH, seed=4) * 0.2, False)
CHOSEN = torch.stack([torch.randperm(COUNT, generator=torch.Generator().manual_seed(row))[:2] for row in range(ROWS)])
WEIGHTS = numbers(ROWS, 2, seed=5).softmax(-1)


def linear(rows: LoraRows | None, of: slice) -> Tensor:
    return lora_linear(X[of].clone(), QKV_WEIGHT, QKV, rows)


def mixture(rows: LoraRows | None, of: slice) -> Tensor:
    experts = Experts(GATE_UP, DOWN)
    return expert_block(X[of].clone(), WEIGHTS[of].clone(), CHOSEN[of].clone(), experts, NAMES, rows)


def wanted_linear(rows: LoraRows) -> Tensor:
    y = X.double() @ QKV_WEIGHT.double().t()
    for group in rows.groups(QKV.a):
        views = {name: view.double() for name, view in group.adapter.views.items()}
        own, (q, k) = slice(group.start, group.stop), (views[QKV.a][: 2 * group.adapter.rank].chunk(2))
        for b, a, at in zip(QKV.b, (q, k), (0, CONFIG.q_size), strict=True):
            y[own, at : at + len(views[b])] += group.scale * X[own].double() @ a.t() @ views[b].t()
    return y


def wanted_mixture(rows: LoraRows) -> Tensor:
    """The formula, for one pair of a token and an expert after another."""
    group_of, out = rows.group_of_row(X.device).tolist(), torch.zeros(ROWS, CONFIG.hidden_size, dtype=torch.float64)
    for row in range(ROWS):
        own = rows.adapters[group_of[row]]
        views = {name: view.double() for name, view in own.views.items()} if own is not None else {}
        scale, x = rows.adapters[group_of[row]].scale if own is not None else 0.0, X[row].double()  # type: ignore[union-attr]
        for weight, e in zip(WEIGHTS[row].double(), CHOSEN[row].tolist(), strict=True):
            gate, up = (GATE_UP[e].double() @ x).chunk(2)
            if views:
                a_gate, a_up = (scale * views[NAMES.gate_up_a] @ x).chunk(2)
                gate_b, up_b = (views[name][e] for name in NAMES.inner_b)
                gate, up = gate + gate_b @ a_gate, up + up_b @ a_up
            h = F.silu(gate) * up
            y = DOWN[e].double() @ h
            if views:
                y = y + scale * views[NAMES.down_b] @ (views[NAMES.down_a][e] @ h)
            out[row] += weight * y
    return out


KINDS = pytest.mark.parametrize(("kind", "wanted"), [(linear, wanted_linear), (mixture, wanted_mixture)])
Kind = Callable[[LoraRows | None, slice], Tensor]


@pytest.fixture(autouse=True)
def in_one_call(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have these functions compute it, whatever others could."""
    called: list[str] = []
    for weight in (QKV_WEIGHT, GATE_UP, DOWN):
        assert gemm.pack(weight), "install a C compiler"
    for name in ("linear", "mixture"):
        real = getattr(joined, name)
        monkeypatch.setattr(joined, name, lambda *given, real=real, name=name: called.append(name) or real(*given))
    return called


@KINDS
def test_numbers_are_those_of_the_formula(
    kind: Kind, wanted: Callable[[LoraRows], Tensor], in_one_call: list[str]
) -> None:
    rows = batch()
    torch.testing.assert_close(kind(rows, slice(None)).double(), wanted(rows), rtol=1e-4, atol=1e-4)
    alone = LoraRows([0, ROWS], [None])
    torch.testing.assert_close(kind(None, slice(None)).double(), wanted(alone), rtol=1e-4, atol=1e-4)
    assert in_one_call == [kind.__name__] * 2


@KINDS
def test_a_group_has_the_same_bits_in_any_company(kind: Kind, wanted: object) -> None:
    rows = batch()
    crowded = kind(rows, slice(None))
    for group in range(len(RANKS)):
        of = slice(rows.offsets[group], rows.offsets[group + 1])
        assert torch.equal(kind(batch(range(group, group + 1)), of), crowded[of])


@KINDS
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(kind: Kind, wanted: object, threads: int) -> None:
    alone = kind(batch(), slice(None))
    torch.set_num_threads(threads)
    assert torch.equal(kind(batch(), slice(None)), alone)


@KINDS
def test_a_nan_stays_in_its_row(kind: Kind, wanted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    clean, row = kind(batch(), slice(None)), 7
    spoilt = X.clone()
    spoilt[row, 3] = torch.nan
    monkeypatch.setattr("tests.workers.model.test_joined.X", spoilt)
    found, others = kind(batch(), slice(None)), torch.arange(ROWS) != row
    assert found[row].isnan().any()
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize(("dim", "turned"), [(16, 16), (24, 8), (5, 4), (64, 0)])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_normed_and_turned_as_torch_does_it(dim: int, turned: int, normed: bool) -> None:
    x, norm = numbers(9, 3 * dim + 7, seed=1)[:, : 3 * dim], numbers(dim, seed=2)
    angles = numbers(2, 9, 1, turned, seed=3)
    wanted = x.unflatten(1, (3, dim))
    wanted = F.rms_norm(wanted, (dim,), norm, 1e-3) if normed else wanted
    own = (norm if normed else None, 1e-3, (angles[0], angles[1]))
    found = joined.heads(x, 3, *own)
    torch.testing.assert_close(found, turn(wanted, (angles[0], angles[1])).flatten(1))
    one = joined.heads(x[4:5].clone(), 3, own[0], 1e-3, (angles[0, 4:5], angles[1, 4:5]))
    assert torch.equal(one[0], found[4])


@pytest.mark.parametrize(("experts", "choices"), [(4, 2), (16, 4), (37, 37), (128, 8)])
@pytest.mark.parametrize("normed", [True, False])
def test_experts_are_chosen_as_by_the_formula(experts: int, choices: int, normed: bool) -> None:
    logits = numbers(20, experts, seed=1) * 3
    weights, chosen = joined.choose(logits, choices, normed=normed, scaling=1.5)
    best = logits.double().softmax(-1).topk(choices)
    assert torch.equal(chosen, best.indices)
    wanted = 1.5 * best.values / (best.values.sum(-1, keepdim=True) if normed else 1.0)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-7)
    alone = joined.choose(logits[7:8].clone(), choices, normed=normed, scaling=1.5)
    assert torch.equal(alone[0][0], weights[7])


def test_of_equal_experts_the_first_is_chosen_and_nan_names_experts_too() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0], [torch.nan, 1.0, torch.nan, 3.0]])
    weights, chosen = joined.choose(logits, 2, normed=True, scaling=1.0)
    assert chosen[0].tolist() == [1, 2]
    assert len(set(chosen[1].tolist())) == 2
    assert 0 <= chosen[1].min() <= chosen[1].max() < 4
    assert weights[1].isnan().all()


def test_what_is_fetched_ahead_is_all_factors_in_the_order_of_their_use() -> None:
    """An adapter that neighbours share is fetched once, and nothing beyond the limit is fetched."""
    native, block = build.library(), 1024
    assert native is not None
    shared, other = adapter(CONFIG, 9, 0), adapter(CONFIG, 4, 1)
    on = NativeProducts.dense(LoraRows([0, 2, 3, 5, 6], [shared, shared, None, other]))
    factors, _ = on.linear(QKV.a, CONFIG.hidden_size, QKV.parts)
    room = (ctypes.c_void_p * 1000)()
    native.weft_blocks.restype = ctypes.c_int64

    def found(most: int) -> list[int | None]:
        count = native.weft_blocks(factors, ctypes.c_int64(len(factors)), room, ctypes.c_int64(most))
        return list(room[:count])

    wanted = []
    for own in (shared, other):
        for name, stack in ((QKV.a, 2), *((name, 1) for name in QKV.b)):
            n = CONFIG.hidden_size if name == QKV.a else own.views[name].shape[0]
            start = own.flat.data_ptr() + 4 * own.shape.slots[name].offset
            wanted += range(start, start + 4 * stack * own.rank * n, block)
    assert found(1000) == wanted
    assert found(3) == wanted[:3]
