"""How the start-up test compares: a batch with its own rows, and an adapter's products with rows at different places.
test_probe.py tests what it asks of a decoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.model import isolation
from workers.model.config import GateConfig
from workers.model.isolation import BATCHES

CPU = torch.device("cpu")


# ---- a batch and its rows


@pytest.mark.parametrize("rows", sorted({rows for rows, _ in BATCHES}))
def test_a_batch_with_other_results_is_named_by_its_rows(rows: int) -> None:
    assert isolation._first_difference(lambda x: x * 2 + (len(x) == rows), 8, 1024, CPU) == rows


def test_a_function_of_each_number_alone_has_no_difference() -> None:
    assert isolation._first_difference(lambda x: x * 2, 8, 1024, CPU) is None


@pytest.mark.parametrize("rows", [1024, 36, 35, 16])
def test_every_batch_that_fits_is_compared_with_its_own_rows(rows: int) -> None:
    asked: list[Tensor] = []

    def of(x: Tensor) -> Tensor:
        asked.append(x)
        return x * 2

    assert isolation._first_difference(of, 3, rows, CPU) is None
    whole, *batches = asked
    assert whole.shape == (rows, 3)
    assert whole.unique().numel() == whole.numel()  # rows are told apart by their numbers
    fit = [(count, start) for count, start in BATCHES if start + count <= rows]
    assert len(batches) == len(fit)
    for batch, (count, start) in zip(batches, fit, strict=True):
        assert torch.equal(batch, whole[start : start + count])


@pytest.mark.parametrize("start", [0, 5])
def test_a_difference_at_one_place_only_is_found(start: int) -> None:
    first: list[Tensor] = []

    def of(x: Tensor) -> Tensor:
        first.append(x)
        return x * 2 + (len(x) == 7 and torch.equal(x[0], first[0][start]))

    assert isolation._first_difference(of, 3, 64, CPU) == 7


def test_batches_are_on_both_sides_of_what_kernels_are_cut_to() -> None:
    sizes = {rows for rows, _ in BATCHES}
    for tile in (16, 32, 64, 128, 256):
        assert {size // tile for size in sizes} >= {0, 1}
        assert any(size % tile for size in sizes if size > tile)
    assert 1 in sizes
    assert {start for rows, start in BATCHES if rows != 253} == {0, 5}


@pytest.mark.parametrize("threads", [2, 3, 5, 7])
@pytest.mark.parametrize("width", [24, 96, 768])
def test_functions_that_round_otherwise_where_a_thread_begins_are_found(threads: int, width: int) -> None:
    """Torch's vectorised functions do: the numbers left over at the end of a thread's share go through other code. A
    share is a part of all numbers, wherever rows end, and a small tensor has only one."""

    def of(x: Tensor) -> Tensor:
        y = x.flatten() * 2
        count = max(1, min(threads, -(-len(y) // 32768)))
        share = -(-len(y) // count)
        for part in y.split(share):
            part[len(part) // 16 * 16 :] += 1
        return y.view_as(x)

    row_alone_differs = width % 16 != 0
    found = isolation._first_difference(of, width, isolation.MAX_ROWS, CPU)
    assert (found is not None) == (row_alone_differs or isolation.MAX_ROWS * width % threads != 0)


# ---- the products of an adapter, by where their rows lie


X, A = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[1.0, 0, 2], [3, 1, 0]])


def test_the_three_products_of_an_adapter() -> None:
    assert torch.equal(isolation._shrink(X, A), torch.tensor([[7.0, 5], [16, 17]]))
    x = X.clone()
    # u is (1, 2) in each row: x + (1 a_0 + 2 a_1) / 2
    assert torch.equal(isolation._expand(x, A), X + torch.tensor([3.5, 1, 1]))
    assert torch.equal(x, X)
    # u is 1 in the first row, and 2 in the second: (1 x_0 + 2 x_1) / 2 for each rank
    assert torch.equal(isolation._gradient(X, A), torch.tensor([[4.5, 6, 7.5], [4.5, 6, 7.5]]))


@pytest.mark.parametrize("which", ["_shrink", "_expand", "_gradient", ""])
def test_a_product_that_depends_on_where_its_rows_lie(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    for name in ("_shrink", "_expand", "_gradient"):
        depends = name == which

        def of(x: Tensor, a: Tensor, depends: bool = depends) -> Tensor:
            assert (x.shape[1], a.shape[1], len(a) in (1, 4, 7, 16)) == (12, 12, True)
            return x * 2 + (depends and x.storage_offset() > 0)

        monkeypatch.setattr(isolation, name, of)
    assert isolation._depends_on_alignment(12, CPU) is bool(which)


@pytest.mark.parametrize("rank", [1, 4, 7, 16])
@pytest.mark.parametrize(("rows", "start"), [(1, 1), (6, 3), (17, 5), (40, 7)])
def test_every_rank_and_place_is_compared(monkeypatch: pytest.MonkeyPatch, rank: int, rows: int, start: int) -> None:
    def of(x: Tensor, a: Tensor) -> Tensor:
        return x * 2 + (len(a) == rank and len(x) == rows and x.storage_offset() == start * 12)

    monkeypatch.setattr(isolation, "_gradient", of)
    assert isolation._depends_on_alignment(12, CPU)


def test_forward_and_backward_of_an_mlp_are_both_looked_at() -> None:
    """For squared ReLU at 3: h = 9, dh/dup = 6, and the sum of h * up, which the products' backward takes."""
    found = isolation._activation(GateConfig(gated=False), torch.tensor([[3.0, -1.0], [1.0, 2.0]]))
    assert torch.equal(found, torch.tensor([[9.0, 0, 6, 0, 27], [1, 4, 2, 4, 9]]))
    one_row = isolation._activation(GateConfig(gated=False), torch.tensor([[3.0, 2.0]]))
    assert torch.equal(one_row, torch.tensor([[9.0, 4, 6, 4, 35]]))
    gate_up = torch.tensor([[0.0, 0.0, 2.0, 5.0]])  # silu(0) = 0, and its slope there is 1/2
    assert torch.equal(isolation._activation(GateConfig(), gate_up), torch.tensor([[0.0, 0, 1, 2.5, 0, 0, 0]]))
