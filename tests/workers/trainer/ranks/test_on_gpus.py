"""A trainer of several ranks on GPUs gives the bits of one process on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.model.models import reference
from tests.workers.trainer.ranks.test_same_bits import OWNED, PART, together


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [PART, OWNED])
def test_on_gpus_as_one_process(tmp_path: Path, layout: str, dtype: str) -> None:
    """As many ranks as there are GPUs, over NCCL; with one GPU, a single rank that sends to itself."""
    scenarios = ["plain", "recomputed", "paged"]
    reference("moe").save_pretrained(tmp_path / "model")
    args = [str(tmp_path / "model"), str(tmp_path), layout, "3", "usual", *scenarios]
    found = together(min(4, torch.cuda.device_count()), args, RANKS_DEVICE="cuda", RANKS_DTYPE=dtype)
    assert [world["scenario"] for world in found] == scenarios
    for world in found:
        assert len(world["same"]) > 36
        assert all(world["same"]), world
        assert world["scenario"] != "paged" or world["pages"] > 0
