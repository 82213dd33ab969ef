"""Each rank copies exactly its rows of every family's parameters, and reads no others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.workers.model.models import FAMILIES, ours, reference
from workers.model.base.sharded import copy_shards, rows_of
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
