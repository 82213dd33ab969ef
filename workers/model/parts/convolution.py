"""The short causal convolution before a recurrence: of each channel by itself, over its last positions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def convolved(taps: Sequence[Tensor], weight_MJ: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """The sum of each position's J taps [.., M], the oldest first."""
    total = taps[0] * weight_MJ[:, 0]
    for j, tap in enumerate(taps[1:], start=1):
        total = total + tap * weight_MJ[:, j]
    return total if bias_M is None else total + bias_M
