"""The grouped product of the experts against one product after another. torch's function runs on a CPU too."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.workers.model.gpu_kit import DEVICE
from workers.model.lora import base_mm as grouped


@pytest.mark.parametrize("most", [1024, 3], ids=["one call", "calls of two groups"])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_is_one_after_the_other(transposed: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([4, 4, 21, 22, 40], dtype=torch.int32, device=DEVICE)  # the second expert has no rows
    weight = torch.randn(5, 24, 16, generator=generator).bfloat16().to(DEVICE)
    x = torch.randn(40, 24 if transposed else 16, generator=generator).to(DEVICE)
    wanted, starts = [], [0, *ends.tolist()]  # on the CPU, in float32
    for expert, (start, stop) in enumerate(pairwise(starts)):
        factor = weight[expert].cpu().float()
        wanted.append(x[start:stop].cpu().bfloat16().float() @ (factor if transposed else factor.t()))
    monkeypatch.setattr(grouped, "takes", lambda x, weight: True)
    monkeypatch.setattr(grouped, "MAX_GROUPS", most)
    found = grouped.per_expert(x, weight, ends, transposed=transposed)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.cpu().float(), torch.cat(wanted), atol=2e-2, rtol=1.6e-2)


def test_what_the_grouped_kernel_takes() -> None:
    if DEVICE.type == "cpu":
        assert not grouped.takes(torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(1, 16, 8, dtype=torch.bfloat16))
        return
    rows = torch.zeros(2, 16, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.zeros(1, 16, 8, dtype=torch.bfloat16, device=DEVICE)
    assert grouped.takes(rows, weight)
    assert not grouped.takes(rows.float(), weight)
    assert not grouped.takes(rows, weight[..., :7])
    assert not grouped.takes(rows[:0], weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_graphs_hold_is_one_after_the_other(dtype: torch.dtype) -> None:
    """Runs shorter and longer than a block, an empty one, and widths that no block divides."""
    from workers.model.gpu.experts import expert_mm

    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([4, 4, 45, 46, 64, 64], dtype=torch.int32)
    weight = torch.randn(6, 72, 88, generator=generator).to(dtype)
    x = torch.randn(64, 88, generator=generator).to(dtype)
    found = expert_mm(x.to(DEVICE), weight.to(DEVICE), ends.to(DEVICE))
    assert found.dtype == dtype
    starts = [0, *ends.tolist()]
    wanted = [x[a:b].double() @ weight[e].double().t() for e, (a, b) in enumerate(pairwise(starts))]
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 1.6e-2}
    torch.testing.assert_close(found.cpu().double(), torch.cat(wanted), **tolerance)
