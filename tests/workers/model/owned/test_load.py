"""Each owner reads its share of every family's experts and the rest whole, and no more; experts that cannot be shared
out are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from scheduler.links.configs import Basics, TrainerConfig
from tests.workers.model.models import FAMILIES, ours, reference
from workers.model.base.sharded import held_bytes
from workers.model.base.stored import Stored
from workers.model.config import UnsupportedModel
from workers.model.device import ModelDevice
from workers.model.owned.load import Owned, is_of_experts, load_owned
from workers.trainer.ranks import process

RANKS = 2
CPU = torch.device("cpu")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int, int], Owned]:
    """Load the model as `rank` does, one of so many ranks."""

    def as_rank(folder: Path, rank: int, ranks: int) -> Owned:
        monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
        return load_owned(folder, torch.float32, CPU)

    return as_rank


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shares_are_the_whole(family: str, tmp_path: Path, load: Callable[[Path, int, int], Owned]) -> None:
    whole = ours(reference(family), tmp_path)
    if not whole.config.num_experts:
        with pytest.raises(UnsupportedModel, match="it has no experts that ranks could own; supported: trainer"):
            load(tmp_path, 0, RANKS)
        return
    stored, read = Stored.rows, list[int]()

    def counted(self: Stored, name: str, begin: int, end: int) -> torch.Tensor:
        rows = stored(self, name, begin, end)
        read.append(rows.nbytes)
        return rows

    each = whole.config.num_experts // RANKS
    for rank in range(RANKS):
        read.clear()
        with patch.object(Stored, "rows", counted):
            decoder = load(tmp_path, rank, RANKS).decoder
        found = dict(decoder.named_parameters())
        assert found.keys() == dict(whole.named_parameters()).keys()
        for name, weight in whole.named_parameters():
            mine = weight[rank * each : (rank + 1) * each] if is_of_experts(whole, name) else weight
            assert torch.equal(found[name], mine), name
        assert sum(read) <= held_bytes(decoder) < sum(weight.nbytes for weight in whole.parameters())


@pytest.mark.parametrize("ranks", [3, 8])
def test_shares_that_are_not_equal_are_refused(
    tmp_path: Path, load: Callable[[Path, int, int], Owned], ranks: int
) -> None:
    reference("moe").save_pretrained(tmp_path)
    said = f"{ranks} ranks cannot own its 4 experts in equal shares; supported: trainer"
    with pytest.raises(UnsupportedModel, match=said):
        load(tmp_path, 0, ranks)


def test_a_machine_that_must_keep_tenants_apart_is_refused(
    tmp_path: Path, load: Callable[[Path, int, int], Owned], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference("moe").save_pretrained(tmp_path)
    group: Any = SimpleNamespace(control=None, exchange=lambda own: [own, "per-segment"], leads=False, size=RANKS)
    basics = Basics(str(tmp_path), {"m": str(tmp_path)}, device="cpu")
    load(tmp_path, 0, RANKS)  # as rank 0
    where, mesh = ModelDevice(CPU, torch.float32), SimpleNamespace()
    with pytest.raises(UnsupportedModel, match="this machine must compute each tenant's alone; supported: trainer"):
        process.load(TrainerConfig(basics, ranks=RANKS, shard="experts"), where, mesh, group)  # type: ignore[arg-type]
