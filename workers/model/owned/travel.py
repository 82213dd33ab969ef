"""The collectives of an exchange: every process sends rows, arenas or numbers to every other. exchange.py calls them,
in the same order on all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.model.adapters.adapter import Adapter


class Travel:
    """`control`: the process group for numbers that hosts need, on the CPU."""

    def __init__(self, device: torch.device, control: dist.ProcessGroup | None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device, self._control = device, control

    def rows(self, parts: Sequence[Tensor], out: list[int], into: list[int]) -> list[Tensor]:
        """Send rows of several tensors together, out[i] of them to process i; returns those received, into[i] of them
        from process i."""
        wire = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
        got = wire.new_empty(sum(into), wire.shape[1])
        dist.all_to_all_single(got, wire, into, out)
        columns = got.split_with_sizes([part.shape[1] * part.element_size() for part in parts], dim=1)
        return [column.contiguous().view(part.dtype) for column, part in zip(columns, parts, strict=True)]

    def arenas(self, out: Sequence[Sequence[Adapter]], into: list[int]) -> Tensor:
        """Send arenas to each process; returns the float32 numbers received, into[i] of them from process i, in the
        order of processes."""
        flats = [arena.flat for each in out for arena in each]
        wire = torch.cat(flats) if flats else torch.empty(0, device=self._device)
        got = wire.new_empty(sum(into))
        dist.all_to_all_single(got, wire, into, [sum(arena.flat.numel() for arena in each) for each in out])
        return got

    def counts(self, place: int, out: list[list[int]], sizes: list[int]) -> list[list[int]]:
        """Send process i the list out[i], all equally long; from process i come sizes[i] numbers. Raises RuntimeError
        unless all processes are at the same `place` of a step."""
        own = torch.tensor([[place, *each] for each in out])
        splits = [1 + size for size in sizes]
        got = torch.empty(sum(splits), dtype=torch.int64)
        dist.all_to_all_single(got, own.view(-1), splits, [own.shape[1]] * self.size, group=self._control)
        came = [each.tolist() for each in got.split_with_sizes(splits)]
        if any(each[0] != place for each in came):
            raise RuntimeError(f"ranks are at different places of a step: {[each[0] for each in came]}")
        return [each[1:] for each in came]

    def objects(self, own: Any) -> list[Any]:
        """Each process's object, in the order of processes."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._control)
        return found
