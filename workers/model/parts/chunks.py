"""Common parts of recurrences whose state is a matrix for each head: the short causal convolution before them, cutting
a sequence into chunks, and reading a state. gated_delta.py and mamba2.py use them.

Shapes: H heads, N tokens, C chunks, L tokens of a chunk, R rows, D numbers of a key (or query), V numbers of a value, M
channels of the convolution, J its taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def convolved(taps: Sequence[Tensor], weight_MJ: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """The causal convolution: for each channel the weighted sum of J inputs, plus the bias. `taps` are those inputs of
    every position, [.., M] each, the oldest first."""
    weight_JM = weight_MJ.t().contiguous()  # torch's vectorised code needs neighbouring elements
    total = taps[0] * weight_JM[0]
    for tap, own in zip(taps[1:], weight_JM[1:], strict=True):
        total = total + tap * own
    return total if bias_M is None else total + bias_M


def chunked(x_HN: Tensor, length: int) -> Tensor:
    """[H, C, L, ...] from [H, N, ...], filled up with zeros; from [H, N], one number for each token, [H, C, L, 1]."""
    x_HNX = x_HN if x_HN.dim() == 3 else x_HN[..., None]
    heads, count, width = x_HNX.shape
    return F.pad(x_HNX, (0, 0, 0, -count % length)).reshape(heads, -1, length, width)


def faded(total_HCL1: Tensor) -> Tensor:
    """[H, C, L, L]: the fraction of what token j (last axis) wrote that is left when token i reads; 1 for i = j, 0 for
    i < j. `total_HCL1`: the sums of the decays' logarithms from the chunk's beginning to each token."""
    length = total_HCL1.shape[-2]
    ahead_LL = torch.ones(length, length, dtype=torch.bool, device=total_HCL1.device).triu(1)
    return (total_HCL1 - total_HCL1.mT).masked_fill(ahead_LL, -torch.inf).exp()


def by_head(heads: int, x_NM: Tensor) -> Tensor:
    """[N, heads, M / heads]."""
    return x_NM.reshape(len(x_NM), heads, -1)


def read(state_RHDV: Tensor, at_RHD: Tensor) -> Tensor:
    """S^T k for each row and head, [R, H, V]; `at_RHD` are the k."""
    rows, heads = at_RHD.shape[:2]
    return torch.bmm(at_RHD.flatten(0, 1)[:, None], state_RHDV.flatten(0, 1)).view(rows, heads, -1)
