"""Each rank copies exactly its rows of every family's parameters, and reads no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.parts.toy import CONFIG, save_toy
from tests.workers.model.models import FAMILIES, ours, reference
from workers.model.attend import PackedAttend
from workers.model.base import sharded
from workers.model.base.sharded import copy_shards, load_sharded, rows_of, units
from workers.model.base.stored import Stored
from workers.model.card import weight_files

RANKS = 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_are_the_whole(family: str, tmp_path: Path) -> None:
    decoder = ours(reference(family), tmp_path)
    stored, read = Stored.rows, list[int]()

    def counted(self: Stored, name: str, begin: int, end: int) -> torch.Tensor:
        rows = stored(self, name, begin, end)
        read.append(rows.numel())
        return rows

    for rank in range(RANKS):
        parts: dict[str, torch.Tensor] = {}
        for name, weight in decoder.named_parameters():
            begin, end = rows_of(len(weight), rank, RANKS)
            parts[name] = torch.full_like(weight[begin:end], torch.nan)
        part: Any = SimpleNamespace(
            config=decoder.config,
            dtype=torch.float32,
            get_parameter=lambda name, parts=parts: SimpleNamespace(to_local=lambda: parts[name]),
        )
        mesh: Any = SimpleNamespace(get_local_rank=lambda dim, rank=rank: rank, size=lambda dim: RANKS)
        with patch.object(Stored, "rows", counted):
            copy_shards(part, weight_files("model", tmp_path), mesh)
        for name, weight in decoder.named_parameters():
            begin, end = rows_of(len(weight), rank, RANKS)
            assert torch.equal(parts[name], weight[begin:end]), name
    assert sum(read) <= sum(weight.numel() for weight in decoder.parameters())


@pytest.fixture
def one_of_two() -> Iterator[DeviceMesh]:
    """A process that is the first of two ranks; there is no second."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("recompute", [False, True])
def test_no_more_than_two_layers_are_whole_at_a_time(tmp_path: Path, one_of_two: DeviceMesh, recompute: bool) -> None:
    """A layer that is still being gathered counts. A backward finds the forward's last two, and gathers the others
    again."""
    config = replace(CONFIG, vocab_size=64, num_layers=5)
    model = load_sharded(save_toy(tmp_path / "toy", config), torch.float32, torch.device("cpu"), one_of_two)
    groups: list[Any] = [unit._get_fsdp_state()._fsdp_param_group for unit in units(model.decoder)[1:]]  # type: ignore[attr-defined]
    whole, exchange = list[int](), sharded._Exchange

    def counted(*parts: Any) -> Any:
        whole.append(1 + sum(group.is_unsharded or group._all_gather_result is not None for group in groups))
        return exchange(*parts)

    def first(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return given[0].requires_grad_(), *given[1:]

    model.decoder.layers[0].register_forward_pre_hook(first)
    model.decoder.begin_step = lambda *_: recompute
    with patch.object(sharded, "_Exchange", counted):
        hidden = model.decoder(torch.zeros(4, dtype=torch.long), torch.arange(4), PackedAttend([4]))
        gathered = len(whole)
        hidden.sum().backward()
    assert (gathered, len(whole) - gathered) == (1 + 5, 5 - 2)
    assert max(whole) == 2
