"""The short causal convolution before a recurrence: of each channel by itself, over its last positions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def convolved(taps: Sequence[Tensor], weight_MJ: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """The sum of each position's J taps [.., M], the oldest first."""
    weight_JM = weight_MJ.t().contiguous()  # torch's vectors need neighbours
    total = taps[0] * weight_JM[0]
    for tap, own in zip(taps[1:], weight_JM[1:], strict=True):
        total = total + tap * own
    return total if bias_M is None else total + bias_M
