"""Products with the frozen experts: one grouped GEMM over all of them where the device has it, else one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.base_mm import base_mm, filled
from workers.model.native.gemm import packed

#: torch's CUDA kernel takes fewer groups than this, and rows that are multiples of 16 bytes.
MAX_GROUPS = 1024
ROW_BYTES = 16


def per_expert(x_PI: Tensor, weight_EOI: Tensor, ends_E: Tensor, *, transposed: bool = False) -> Tensor:
    """y_P = x W_e^T (x W_e when `transposed`) of rows sorted by expert, in the weights' dtype; `ends_E` int32 on the
    device says where the rows of each expert end."""
    if not transposed and (panels := packed(weight_EOI)) is not None:
        return panels.product(x_PI.contiguous(), ends_E=ends_E)
    x_PI = x_PI.to(weight_EOI.dtype)
    weight_EIO = weight_EOI if transposed else weight_EOI.transpose(1, 2)
    if takes(x_PI, weight_EIO):
        return _grouped(x_PI, weight_EIO, ends_E)
    y_PO = x_PI.new_empty(x_PI.shape[0], weight_EIO.shape[2])
    start = 0
    for weight_OI, end in zip(weight_EOI.unbind(), ends_E.tolist(), strict=True):
        if end > start:
            # The rows beyond `end` are the next experts' own, who write them after: padding without a copy.
            stop = filled(start, end, len(x_PI))
            base_mm(x_PI[start:stop], weight_OI, transposed=transposed, out=y_PO[start:stop])
        start = end
    return y_PO


def takes(x_PI: Tensor, weight_EIO: Tensor) -> bool:
    """Whether the grouped kernel computes this product."""
    widths = (*weight_EIO.shape[1:],)
    aligned = all(width * x_PI.element_size() % ROW_BYTES == 0 for width in widths)
    return x_PI.is_cuda and x_PI.dtype == torch.bfloat16 and aligned and len(x_PI) > 0


def _grouped(x_PI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    if len(weight_EIO) < MAX_GROUPS:
        return F.grouped_mm(x_PI, weight_EIO, offs=ends_E)
    parts, start = [], 0
    for first in range(0, len(weight_EIO), MAX_GROUPS - 1):
        ends = ends_E[first : first + MAX_GROUPS - 1]
        stop = int(ends[-1])
        parts.append(F.grouped_mm(x_PI[start:stop], weight_EIO[first : first + len(ends)], offs=ends - start))
        start = stop
    return torch.cat(parts)
