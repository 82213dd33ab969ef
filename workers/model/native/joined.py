"""Linears and mixtures of experts with their adapters, each in one call, where nothing needs a gradient (joined.c).

The factors of many adapters are read while the base is multiplied, and what is small is not spread over dozens of
torch's operations. `lora/` and `mixture/` call it where the weights are packed.

Shapes: T tokens, K choices, O out, I in, D hidden.
"""

from __future__ import annotations

import ctypes
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.config import GateConfig
from workers.model.lora.rows import LoraRows
from workers.model.native.build import library
from workers.model.native.gemm import Packed, at, rows_at
from workers.model.native.launch import PARTS, Factor, NativeProducts, Parts, table_of

#: The tensors of an MLP's adapter: gate_up_A, gate_B, up_B, down_A and down_B.
Names = tuple[str, str, str, str, str]


def takes_parts(products: object, parts: Parts) -> TypeGuard[NativeProducts | None]:
    """True if `linear` can compute that many parts of these adapters."""
    return products is None or (isinstance(products, NativeProducts) and len(parts) <= PARTS)


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


def serves(x_TI: Tensor) -> bool:
    """True if `heads` and `rms_norm` in C can compute these rows."""
    fits = x_TI.dtype == torch.float32 and x_TI.device.type == "cpu" and x_TI.stride(-1) == 1
    return fits and torch.is_inference_mode_enabled() and library() is not None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, packed: bool) -> Tensor:
    """x over the root of the mean of its squares, times the weight (arXiv 1910.07467). `packed`: in C where it can be,
    beside weights that are packed for it."""
    if packed and serves(x_TD):
        return heads(x_TD, 1, weight_D, eps)
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


class _Heads(ctypes.Structure):
    """Heads of joined.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "heads", "dim", "turned", "threads")),
        ("eps", ctypes.c_float),
    )


def heads(
    x_TI: Tensor, count: int, norm_D: Tensor | None, eps: float, angles: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """[T, count * D]: each head normed (`norm_D`: RMSNorm) and turned (as `parts.rotary.turn`)."""
    native, dim = library(), x_TI.shape[1] // count
    assert native is not None
    out_TI = x_TI.new_empty(x_TI.shape)
    turned = angles[0].shape[-1] if angles is not None else 0
    of = _Heads(len(x_TI), count, dim, turned, torch.get_num_threads(), eps)
    norm, cosines, sines = (
        at(tensor) if tensor is not None else None for tensor in (norm_D, *(angles or (None, None)))
    )
    native.weft_heads(ctypes.byref(of), *rows_at(x_TI), norm, cosines, sines, *rows_at(out_TI))
    return out_TI


class _Router(ctypes.Structure):
    """Router of joined.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "experts", "choices", "normed", "threads")),
        ("scaling", ctypes.c_float),
    )


def choose(logits_TE: Tensor, choices: int, *, normed: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """softmax(logits) of each token's likeliest experts, over their sum if `normed`, and which they are: [T, K]."""
    native, (tokens, experts) = library(), logits_TE.shape
    assert native is not None
    of = _Router(tokens, experts, choices, normed, torch.get_num_threads(), scaling)
    weights_TK = logits_TE.new_empty(tokens, choices)
    experts_TK = torch.empty(tokens, choices, dtype=torch.int64)
    native.weft_choose(ctypes.byref(of), *rows_at(logits_TE), at(weights_TK), at(experts_TK))
    return weights_TK, experts_TK


class _Mixture(ctypes.Structure):
    """Mixture of joined.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "choices", "hidden", "width", "rank")),
        ("group_of_token", ctypes.c_void_p),
        *((name, Factor) for name in ("gate_up_a", "gate_b", "up_b", "down_a", "down_b")),
    )


def takes(gate: GateConfig) -> bool:
    """True if `mixture` can compute experts with this activation."""
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
