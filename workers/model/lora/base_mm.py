"""Products with the frozen base, whose rows belong to many groups: with one weight, or with one for each expert.

Invariant (isolation): a row has the same bits whatever else is in the batch. By construction in float32 on a CPU that
has a compiler (native/gemm.py); elsewhere by padding to MIN_ROWS rows. No library promises that padding suffices, so
isolation.py tests it at start-up, on the machine and with the threads in use.

Shapes: T rows, P rows sorted by expert, E experts, O out, I in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.native.gemm import packed, product

#: With fewer rows, matrix libraries use other kernels, which round differently. Measured on MKL with 1 and 2 threads.
MIN_ROWS = 16


def base_mm(x_TI: Tensor, weight_OI: Tensor, *, transposed: bool = False, out: Tensor | None = None) -> Tensor:
    """x W^T, or x W if `transposed`, computed in the weight's dtype. Returned in `out` if given; else on a CPU in x's
    dtype and on a device in float32."""
    if not transposed and (panels := packed(weight_OI)) is not None:
        return panels.product(x_TI.contiguous(), out)
    if (own := product(x_TI.contiguous(), weight_OI, transposed=transposed, out=out)) is not None:
        return own
    weight = weight_OI if transposed else weight_OI.t()
    x, rows = x_TI.to(weight.dtype), x_TI.shape[0]
    padded = 0 < rows < MIN_ROWS
    if padded:
        x = torch.cat((x, x.new_zeros(MIN_ROWS - rows, x.shape[1])))
    elif out is not None and out.dtype == weight.dtype:
        return torch.mm(x, weight, out=out)
    # On a device, 16-bit products can give their float32 sums without rounding to 16 bits first.
    precise = x.is_cuda and x.dtype != torch.float32 and out is None
    y = torch.mm(x, weight, torch.float32) if precise else torch.mm(x, weight)
    y = y[:rows] if padded else y
    if out is not None:
        return out.copy_(y)
    return y if x.is_cuda else y.to(x_TI.dtype)


def filled(start: int, end: int, rows: int) -> int:
    """The end of start:end, moved on into the rows that follow until there are MIN_ROWS; `end` itself if too few
    follow."""
    stop = max(end, start + MIN_ROWS)
    return stop if stop <= rows else end


_replayed: ContextVar[bool] = ContextVar("replayed", default=False)


@contextmanager
def replayed() -> Iterator[None]:
    """In the block, experts on a device are multiplied by a kernel that a CUDA graph may contain (gpu/experts.py):
    torch's grouped product is reported to read illegal memory in graphs, and one product per expert would need each
    expert's rows known on the host."""
    before = _replayed.set(True)
    try:
        yield
    finally:
        _replayed.reset(before)


#: The limits of torch's grouped CUDA kernel: fewer groups than this, and rows that are multiples of 16 bytes.
MAX_GROUPS = 1024
ROW_BYTES = 16


def per_expert(x_PI: Tensor, weight_EOI: Tensor, ends_E: Tensor, *, transposed: bool = False) -> Tensor:
    """y_p = x_p W_e^T (x_p W_e if `transposed`) for rows sorted by expert, in the weights' dtype. `ends_E` int32 on the
    device: where the rows of each expert end.

    On a device this is one grouped GEMM if the device has it, else (and in `replayed` always) Triton's; on a CPU our
    own kernels, or expert by expert."""
    if not transposed and (panels := packed(weight_EOI)) is not None:
        return panels.product(x_PI.contiguous(), ends_E=ends_E)
    x_PI = x_PI.to(weight_EOI.dtype)
    weight_EIO = weight_EOI if transposed else weight_EOI.transpose(1, 2)
    grouped = takes(x_PI, weight_EIO)
    if not transposed and (in_triton(x_PI) or (x_PI.is_cuda and not grouped)):
        from workers.model.gpu.experts import expert_mm  # Triton: only a GPU needs it

        return expert_mm(x_PI, weight_EOI, ends_E)
    if grouped:
        return _grouped(x_PI, weight_EIO, ends_E)
    if (own := product(x_PI.contiguous(), weight_EOI, transposed=transposed, ends_E=ends_E)) is not None:
        return own
    y_PO = x_PI.new_empty(x_PI.shape[0], weight_EIO.shape[2])
    start = 0
    for weight_OI, end in zip(weight_EOI.unbind(), ends_E.tolist(), strict=True):
        if end > start:
            # Padding without a copy: rows beyond `end` belong to the next experts, which overwrite them later.
            stop = filled(start, end, len(x_PI))
            base_mm(x_PI[start:stop], weight_OI, transposed=transposed, out=y_PO[start:stop])
        start = end
    return y_PO


def in_triton(x_PI: Tensor) -> bool:
    """True if these rows are on a GPU, and computed within `replayed`."""
    return _replayed.get() and x_PI.is_cuda


def takes(x_PI: Tensor, weight_EIO: Tensor) -> bool:
    """True if the device's grouped kernel can compute this product."""
    widths = (*weight_EIO.shape[1:],)
    aligned = all(width * x_PI.element_size() % ROW_BYTES == 0 for width in widths)
    return x_PI.is_cuda and x_PI.dtype == torch.bfloat16 and aligned and len(x_PI) > 0


def _grouped(x_PI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """The device's grouped product, in parts if there are too many experts for one."""
    if len(weight_EIO) < MAX_GROUPS:
        return F.grouped_mm(x_PI, weight_EIO, offs=ends_E)
    parts, start = [], 0
    for first in range(0, len(weight_EIO), MAX_GROUPS - 1):
        ends = ends_E[first : first + MAX_GROUPS - 1]
        stop = int(ends[-1])
        parts.append(F.grouped_mm(x_PI[start:stop], weight_EIO[first : first + len(ends)], offs=ends - start))
        start = stop
    return torch.cat(parts)
