"""Products with the frozen base, whose rows belong to many groups."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.model.native.gemm import packed

#: Below this many rows matrix libraries use other kernels, with other rounding. Measured on MKL with 1 and 2 threads.
MIN_ROWS = 16


def base_mm(x_TI: Tensor, weight_OI: Tensor, *, transposed: bool = False, out: Tensor | None = None) -> Tensor:
    """x W^T, or x W when `transposed`, in the weight's dtype and returned in x's (in `out` when given).

    A row comes out with the same bits whatever else is in the batch: by construction where the weight is packed
    (native/gemm.py), else by padding to MIN_ROWS rows, which no library promises to suffice; isolation.py tests it at
    start-up on the machine and the threads in use."""
    if not transposed and (panels := packed(weight_OI)) is not None:
        return panels.product(x_TI.contiguous(), out)
    weight = weight_OI if transposed else weight_OI.t()
    x, rows = x_TI.to(weight.dtype), x_TI.shape[0]
    if 0 < rows < MIN_ROWS:
        padded = x.new_zeros(MIN_ROWS, x.shape[1])
        padded[:rows] = x
        y = torch.mm(padded, weight)[:rows]
    elif out is not None and out.dtype == weight.dtype:
        return torch.mm(x, weight, out=out)
    else:
        y = torch.mm(x, weight)
    return out.copy_(y) if out is not None else y.to(x_TI.dtype)


def filled(start: int, end: int, rows: int) -> int:
    """Where start:end must end to be MIN_ROWS with the rows that follow; `end` if these are too few."""
    stop = max(end, start + MIN_ROWS)
    return stop if stop <= rows else end
