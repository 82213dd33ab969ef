"""Caches of random numbers for tests of attention over pages, and the allowed distance from its formula."""

from __future__ import annotations

import torch

from tests.workers.model.gpu_kit import DEVICE
from workers.generator.cache.kv_cache import KVCache

#: A GPU computes powers of two approximately.
LOOSER = 1 if DEVICE.type == "cpu" else 10
#: Relative to the largest entry.
TOLERANCES = {torch.float32: 2e-6 * LOOSER, torch.bfloat16: 2e-2}


def filled_cache(kv_heads: int, dim: int, dtype: torch.dtype, pages: int = 64) -> KVCache:
    cache = KVCache(layers=2, pages=pages, kv_heads=kv_heads, head_dim=dim, dtype=dtype, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache
