"""Products with weights packed once or in each call: torch's numbers, and bits that no neighbour can change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.model.lora.base_mm import base_mm, per_expert
from workers.model.native import gemm


@pytest.fixture(autouse=True)
def threads() -> None:
    assert gemm.pack(torch.zeros(1, 1)), "install a C compiler"


def weight_of(*shape: int) -> Tensor:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    assert gemm.pack(weight)
    return weight


def rows_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("out", "inner"), [(1, 1), (16, 7), (63, 33), (64, 64), (65, 256), (200, 31), (1024, 512)])
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 13, 64])
def test_numbers_are_torchs(rows: int, out: int, inner: int) -> None:
    x, weight = rows_of(rows, inner), weight_of(out, inner)
    torch.testing.assert_close(base_mm(x, weight).double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("out", "inner"), [(150, 96), (100, 33), (65, 40), (17, 40)])
def test_a_row_has_the_same_bits_in_any_batch(out: int, inner: int) -> None:
    x, weight = rows_of(200, inner), weight_of(out, inner)
    whole = base_mm(x, weight)
    for start, count in [(0, 1), (3, 1), (5, 2), (7, 6), (11, 7), (13, 25), (100, 100)]:
        assert torch.equal(base_mm(x[start : start + count].clone(), weight), whole[start : start + count])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    x, weight = rows_of(64, 96), weight_of(500, 96)
    before, alone = torch.get_num_threads(), base_mm(x, weight)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(base_mm(x, weight), alone)
    finally:
        torch.set_num_threads(before)


def test_each_expert_has_its_own_rows() -> None:
    x, weight = rows_of(40, 48), weight_of(5, 70, 48)
    counts = [3, 0, 17, 20, 0]  # some experts have none
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    found = per_expert(x, weight, ends)
    for expert, (own, part) in enumerate(zip(x.split(counts), found.split(counts), strict=True)):
        torch.testing.assert_close(part, own @ weight[expert].t())
        alone = torch.tensor([0] * expert + [len(own)] * (5 - expert), dtype=torch.int32)
        assert torch.equal(per_expert(own.clone(), weight, alone), part)


def test_rows_that_are_not_side_by_side_and_a_place_for_the_result() -> None:
    x, weight = rows_of(9, 64).t(), weight_of(20, 9)
    out = torch.full((64, 30), 7.0)
    base_mm(x, weight, out=out[:, :20])
    torch.testing.assert_close(out[:, :20], x @ weight.t())
    assert (out[:, 20:] == 7.0).all()  # nothing is written outside the place


def test_a_nan_stays_in_its_row() -> None:
    x, weight = rows_of(12, 64), weight_of(100, 64)
    clean = base_mm(x, weight)
    x[5, 3] = torch.nan
    spoilt = base_mm(x, weight)
    others = torch.arange(12) != 5
    assert spoilt[5].isnan().all()
    assert torch.equal(spoilt[others], clean[others])


def test_only_float32_on_the_cpu_is_packed_and_only_while_the_weight_lives() -> None:
    assert not gemm.pack(torch.zeros(4, 4, dtype=torch.bfloat16))
    weight = weight_of(8, 8)
    assert gemm.packed(weight) is not None
    assert gemm.packed(weight.clone()) is None
    weight.add_(1)
    assert gemm.packed(weight) is None  # the copy is stale


def test_rows_of_another_width_are_refused() -> None:
    found = gemm.packed(weight := weight_of(8, 8))
    assert found is not None
    assert weight is not None
    with pytest.raises(ValueError, match="8 numbers"):
        found.product(torch.zeros(2, 9))


def plain(*shape: int) -> Tensor:
    """A weight that is packed in each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("out", "inner"), [(1, 1), (16, 7), (63, 33), (64, 64), (65, 256), (200, 31), (130, 511), (70, 512), (33, 1100)]
)
@pytest.mark.parametrize("rows", [0, 1, 6, 13, 64])
def test_weights_packed_in_each_call_in_both_directions(rows: int, out: int, inner: int) -> None:
    x, weight = rows_of(rows, inner), plain(out, inner)
    there = base_mm(x, weight)
    torch.testing.assert_close(there.double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-4)
    back = base_mm(there, weight, transposed=True)
    torch.testing.assert_close(back.double(), there.double() @ weight.double(), rtol=1e-4, atol=1e-3)
    assert torch.equal(there, base_mm(x, weight_of(out, inner)))  # packed once: the same bits


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_weights_packed_in_each_call_give_a_row_the_same_bits_in_any_batch(threads: int, transposed: bool) -> None:
    x, weight = rows_of(200, 600), plain(600, 150) if transposed else plain(150, 600)
    before, whole = torch.get_num_threads(), base_mm(x, weight, transposed=transposed)
    try:
        torch.set_num_threads(threads)
        for start, count in [(0, 200), (0, 1), (3, 1), (5, 2), (7, 6), (11, 7), (13, 25), (100, 100)]:
            found = base_mm(x[start : start + count].clone(), weight, transposed=transposed)
            assert torch.equal(found, whole[start : start + count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("transposed", [False, True])
def test_each_expert_packed_in_each_call_has_its_own_rows(transposed: bool) -> None:
    x, weight = rows_of(40, 48), plain(5, 48, 70) if transposed else plain(5, 70, 48)
    counts = [3, 0, 17, 20, 0]
    found = per_expert(x, weight, torch.tensor(counts).cumsum(0).to(torch.int32), transposed=transposed)
    for expert, (own, part) in enumerate(zip(x.split(counts), found.split(counts), strict=True)):
        torch.testing.assert_close(part, own @ (weight[expert] if transposed else weight[expert].t()))


def test_a_weight_that_is_a_part_of_another_is_read_in_place() -> None:
    x, weight = rows_of(9, 40), plain(50, 100)[3:23, 17:57]
    torch.testing.assert_close(base_mm(x, weight), x @ weight.t())
    torch.testing.assert_close(base_mm(x[:, :20], weight, transposed=True), x[:, :20] @ weight)
    across = plain(40, 20).t()  # its numbers do not lie side by side
    torch.testing.assert_close(base_mm(x, across), x @ across.t())
