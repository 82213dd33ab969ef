"""The grouped product of the experts against one product after another. torch's function runs on a CPU too."""

from __future__ import annotations

import pytest
import torch

from tests.workers.model.gpu_kit import DEVICE
from workers.model import base_mm as grouped


@pytest.mark.parametrize("most", [1024, 3], ids=["one call", "calls of two groups"])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_is_one_after_the_other(transposed: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([4, 4, 21, 22, 40], dtype=torch.int32, device=DEVICE)  # the second expert has no rows
    weight = torch.randn(5, 24, 16, generator=generator).bfloat16().to(DEVICE)
    x = torch.randn(40, 24 if transposed else 16, generator=generator).to(DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(grouped, "takes", lambda x, weight: False)
        wanted = grouped.per_expert(x, weight, ends, transposed=transposed)
    monkeypatch.setattr(grouped, "takes", lambda x, weight: True)
    monkeypatch.setattr(grouped, "MAX_GROUPS", most)
    found = grouped.per_expert(x, weight, ends, transposed=transposed)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)


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
