"""Causal attention over packed sequences of any lengths in one call: FlashAttention, for 16-bit tensors on CUDA.

Invariant (isolation): keys are never split (`num_splits=1`), so a sequence's result does not depend on the others in
the batch. A backend that takes no `num_splits` (cuDNN's says so in an error) is called without it: FlashAttention 2
splits no packed sequences.

torch.nn.attention.varlen got options between torch 2.11 and 2.13 (`num_splits`, and `enable_gqa`, which grouped heads
then need), so the installed version's signature is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 256


def takes(q_THD: Tensor) -> bool:
    """True if FlashAttention can compute attention for these queries [T, H, D]."""
    head_dim = q_THD.shape[2]
    fits = head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0
    return q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16) and fits


class VarlenAttend:
    """Attention within each of the packed sequences of these `lengths`. k and v may have fewer heads than q."""

    def __init__(self, lengths: Sequence[int], attention: Callable[..., Any] | None = None) -> None:
        if attention is None:
            from torch.nn.attention.varlen import varlen_attn  # slow to import

            attention = varlen_attn
        self._bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        self._longest = max(lengths)
        self._attention: Callable[..., Any] = attention
        known = signature(attention).parameters
        self._options: dict[str, Any] = {"num_splits": 1} if "num_splits" in known else {}
        self._grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, window: int = 0) -> Tensor:
        """[T, H, D]. Each query reaches the last `window` positions of its sequence, its own included; 0: all."""
        self._bounds = self._bounds.to(q_THD.device)
        bounds, longest = self._bounds, self._longest
        options = self._options | (self._grouped if q_THD.shape[1] != k_TKD.shape[1] else {})
        q, k, v = (t.contiguous() for t in (q_THD, k_TKD, v_TKD))
        call = partial(self._attention, q, k, v, bounds, bounds, longest, longest, window_size=(window - 1, 0))
        try:
            out: Tensor = call(**options)
        except RuntimeError as error:
            if "num_splits" not in str(error) or not self._options:
                raise
            self._options = {}
            out = call(**{name: value for name, value in options.items() if name != "num_splits"})
        return out
