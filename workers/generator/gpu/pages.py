"""Copies pages of the cache on a device: one launch for all layers, whatever dtypes they have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.generator.gpu import prefill_kernels as kernels
from workers.model.device import sent

#: How many words of 4 bytes a program copies at once.
BLOCK = 1024
_WORD = 4


def copy_pages(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy page a of each source to page b of its target, for each (a, b) of `pairs`: `copy_pages` of kv_cache.py on a
    device. Tensors are contiguous; raises ValueError if a page is no multiple of 4 bytes."""
    found = [(a.data_ptr(), b.data_ptr(), a[0].nbytes) for a, b in zip(sources, targets, strict=True) if a.numel()]
    if not found or not pairs:
        return
    odd = [size for _, _, size in found if size % _WORD]
    if odd:
        raise ValueError(f"a page of {odd[0]} bytes is no multiple of {_WORD}")
    columns = [*zip(*found, strict=True)]
    numbers = [
        *columns[0],
        *columns[1],
        *(size // _WORD for size in columns[2]),
        *(at for pair in pairs for at in pair),
    ]
    flat = sent(torch.tensor(numbers), sources[0].device)
    kernels.copy_pages[(len(found), len(pairs))](flat, len(found), flat[3 * len(found) :], BLOCK=BLOCK)
