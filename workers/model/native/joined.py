"""Linears and mixtures of experts with their adapters, each in one call, where nothing needs a gradient (joined.c).

The factors of many adapters are read while the base is multiplied, and what is small is not spread over dozens of
torch's operations. `lora.py` and `moe.py` call it where the weights are packed.

Shapes: T tokens, K choices, O out, I in, D hidden.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from workers.model.config import GateConfig
from workers.model.lora_rows import LoraRows
from workers.model.native.build import library
from workers.model.native.gemm import Packed, at, rows_at
from workers.model.native.launch import Factor, NativeProducts, Parts, table_of

#: The tensors of an MLP's adapter: gate_up_A, gate_B, up_B, down_A and down_B.
Names = tuple[str, str, str, str, str]


def linear(x_TI: Tensor, panels: Packed, products: NativeProducts | None, a: str, parts: Parts) -> Tensor:
    """x W^T plus each group's adapter: `a`, stacked, and a B for each of `parts`."""
    native = library()
    assert native is not None
    panels.check(x_TI)
    y_TO = x_TI.new_empty(len(x_TI), panels.out)
    factors, wide = products.linear(a, x_TI.shape[1], parts) if products is not None else (None, 0)
    of_b = ctypes.byref(factors, ctypes.sizeof(Factor)) if factors is not None else None
    if native.weft_linear(
        *panels.where,
        *rows_at(x_TI),
        factors,
        ctypes.c_int64(len(parts)),
        of_b,
        ctypes.c_int64(wide),
        ctypes.c_int32(len(x_TI)),
        *rows_at(y_TO),
    ):
        raise MemoryError(f"no memory for a linear of {len(x_TI)} rows")
    return y_TO


class _Mixture(ctypes.Structure):
    """Mixture of joined.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "choices", "hidden", "width", "rank")),
        ("group_of_token", ctypes.c_void_p),
        *((name, Factor) for name in ("gate_up_a", "gate_b", "up_b", "down_a", "down_b")),
    )


def takes(gate: GateConfig) -> bool:
    """Whether `mixture` computes experts with this activation."""
    return gate.gated and gate.limit is None


def mixture(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: Packed,
    down: Packed,
    names: Names,
    rows: LoraRows | None,
) -> Tensor:
    """The weighted sum of what a token's experts give, silu(gate) * up between their products. `rows`: adapters whose
    outer factors are shared by all experts."""
    native, (tokens, hidden), choices = library(), x_TD.shape, experts_TK.shape[1]
    assert native is not None
    of = _Mixture(tokens, choices, hidden, down.inner)
    if rows is not None:
        table, on = table_of(rows), NativeProducts.dense(rows)
        of.rank, of.group_of_token = table.max_rank, table.segment.data_ptr()
        gate_up_a, gate_b, up_b, down_a, down_b = names
        of.gate_up_a = on.factor(gate_up_a, hidden, stack=2, scaled=True)
        of.gate_b = on.factor(gate_b, down.inner)
        of.up_b = on.factor(up_b, down.inner, part=1)
        of.down_a = on.factor(down_a, down.inner)
        of.down_b = on.factor(down_b, hidden, scaled=True)
    gate_up.check(x_TD)
    out_TD = x_TD.new_empty(tokens, hidden)
    x_TD, weights_TK, experts_TK = x_TD.contiguous(), weights_TK.contiguous(), experts_TK.contiguous()
    given = (at(tensor) for tensor in (x_TD, weights_TK, experts_TK, out_TD))
    if native.weft_mixture(ctypes.byref(of), *gate_up.where, *down.where, *given):
        raise MemoryError(f"no memory for the experts of {tokens} tokens")
    return out_TD
