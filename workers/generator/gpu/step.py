"""One decode step of a fixed number of rows, with all inputs in tensors at fixed addresses.

`compute` reads nothing on the host that changes between steps, so its launches can be replayed after the inputs were
rewritten (`load`, `feed`). Unused rows compute the base model and write their keys and values to the cache's scratch
page. steps.py calls it.

Shapes: R rows, G groups of layers, W pages of a sequence at most, M mixture layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.generator.cache.kv_cache import KVCache
from workers.generator.gpu.attend import PagedAttend
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder
from workers.model.gpu.segments import rewritable
from workers.model.lora.base_mm import replayed
from workers.model.lora.rows import LoraRows

#: Up to this many changed rows of the page table are sent one by one; beyond, the whole table is sent.
MAX_SINGLE_ROWS = 8


class Step:
    """`forms`: the shapes of the adapters that can be loaded (`workers.model.gpu.segments.forms`); empty: the base
    model only."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, rows: int, width: int, forms: Collection[AdapterShape]
    ) -> None:
        device = cache.device
        self._decoder, self._cache, self._rows = decoder, cache, rows
        self._inputs_2R = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._table_GRW = torch.full((cache.groups, rows, width), cache.scratch, dtype=torch.int32, device=device)
        self._attend = PagedAttend(cache, self._table_GRW, self._inputs_2R[1])
        self._adapters = rewritable(forms, rows, device) if forms else None
        #: The rows of the page table that were sent, recorded one by one: a launch may fail between two.
        self._sent_GRW = np.full((cache.groups, rows, width), cache.scratch, dtype=np.int32)

    def load(self, adapters: Sequence[Adapter | None]) -> None:
        """Compute row i with `adapters[i]` from now on. Together they must have this step's forms; rows beyond have
        none."""
        if self._adapters is None:
            return
        (mine, table), device = self._adapters, self._cache.device
        rows = LoraRows(range(self._rows + 1), [*adapters, *[None] * (self._rows - len(adapters))])
        table.rewrite(rows)
        mine.scale_of_row(device).copy_(rows.scale_of_row(device))

    def feed(self, tokens: Sequence[int] | Tensor, positions: Sequence[int], table_GNW: npt.NDArray[np.int32]) -> None:
        """Set the tokens of the first N rows, their positions, and in each group of layers the pages of their
        sequences. Tokens may be on the device. Earlier steps may still be running there: copies are queued behind
        them."""
        rows, inputs_2R = len(positions), np.zeros((2, self._rows), dtype=np.int64)
        inputs_2R[1, :rows] = positions
        if not isinstance(tokens, Tensor):
            inputs_2R[0, :rows] = tokens
        _put(self._inputs_2R, inputs_2R)
        if isinstance(tokens, Tensor):
            self._inputs_2R[0, :rows].copy_(tokens)
        wanted_GRW = np.full(self._sent_GRW.shape, self._cache.scratch, dtype=np.int32)
        wanted_GRW[:, :rows] = table_GNW
        changed = np.argwhere((self._sent_GRW != wanted_GRW).any(axis=2)).tolist()
        if len(changed) > MAX_SINGLE_ROWS:
            _put(self._table_GRW, wanted_GRW)
            self._sent_GRW = wanted_GRW
        else:
            for group, row in changed:
                _put(self._table_GRW[group, row], wanted_GRW[group, row])
                self._sent_GRW[group, row] = wanted_GRW[group, row]

    def compute(self) -> tuple[Tensor, list[Tensor]]:
        """Logits [R, V] for the next tokens, and the experts [R, choices] that each mixture layer chose."""
        chosen: list[Tensor] = []
        tokens_R, positions_R = self._inputs_2R.unbind()
        lora = self._adapters[0] if self._adapters is not None else None
        with replayed():
            hidden_RD = self._decoder(
                tokens_R, positions_R, self._attend, lora, lambda _, experts_TK: chosen.append(experts_TK)
            )
            return self._decoder.logits(hidden_RD, lora), chosen


def _put(target: Tensor, values: npt.NDArray[Any]) -> None:
    """Overwrite a tensor, in the order of launches and without waiting, from newly pinned memory."""
    found = torch.from_numpy(values)
    target.copy_(found.pin_memory() if target.is_cuda else found, non_blocking=True)
