"""silu(gate) * up and its gradient on a CPU, in float32 (gate.c). A row's bits depend on the row alone.

Shapes: P rows, F numbers of a gate, G = 2F: gate and up side by side.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from workers.model.native.build import library
from workers.model.native.gemm import rows_at


def serves(gate_up_PG: Tensor) -> bool:
    """True if the kernels can compute these rows."""
    plain = gate_up_PG.dtype == torch.float32 and gate_up_PG.device.type == "cpu" and gate_up_PG.dim() == 2
    return plain and library() is not None


def swiglu(gate_up_PG: Tensor) -> Tensor:
    """h_PF = silu(gate) * up."""
    native, rows = library(), _side_by_side(gate_up_PG)
    assert native is not None
    h_PF = rows.new_empty(len(rows), rows.shape[1] // 2)
    native.weft_swiglu(*_shape(h_PF), *rows_at(rows), *rows_at(h_PF))
    return h_PF


def swiglu_backward(gate_up_PG: Tensor, dh_PF: Tensor, dgate_up_PG: Tensor) -> None:
    """Write the gradient of gate and up to `dgate_up_PG`."""
    native, rows, dh = library(), _side_by_side(gate_up_PG), _side_by_side(dh_PF)
    assert native is not None
    assert dgate_up_PG.stride(1) == 1
    native.weft_swiglu_back(*_shape(dh), *rows_at(rows), *rows_at(dh), *rows_at(dgate_up_PG))


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _shape(h_PF: Tensor) -> tuple[ctypes.c_int64, ...]:
    return ctypes.c_int64(torch.get_num_threads()), *(ctypes.c_int64(size) for size in h_PF.shape)
