"""One token of each of many sequences through a recurrence whose state is a matrix S [D, V] for each head.
gated_delta.py and mamba2.py call it in decode steps.

S becomes decay S + k w^T, and the output is S^T q. Here w is the value v (Mamba-2) or, by the delta rule, rate (v -
decay S^T k). All in float32.

On a CPU this is recur.c: a step reads and writes every state once. Invariant (isolation): its sums have a fixed order,
so a row's bits depend on the row alone. On a device that fla-core serves it is one of its kernels (gpu/fla.py).
Otherwise, and without a C compiler, torch computes the same up to rounding, with several more passes over the states.

Shapes: R rows, G groups of heads that share queries and keys, H heads, D key dim, V value dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.model.gpu import fla
from workers.model.native import build
from workers.model.parts.chunks import read

_SOURCE = Path(build.__file__).with_name("recur.c")


class Tokens(NamedTuple):
    """The inputs of the recurrence, one token of each row. `decay_RH` are factors, not logarithms; `rate_RH` None: not
    by the delta rule."""

    q_RGD: Tensor
    k_RGD: Tensor
    v_RHV: Tensor
    decay_RH: Tensor
    rate_RH: Tensor | None = None


def one_token(tokens: Tokens, states_HDV: Sequence[Tensor], *, packs: bool = False) -> tuple[Tensor, list[Tensor]]:
    """out [R, H, V] and the states [H, D, V] after the token, as new tensors: those before are not written to. `packs`:
    use fla-core's kernels (`Recurrence.packs`)."""
    if packs:
        return fla.one_token(*tokens, states_HDV)
    native = build.library(_SOURCE) if tokens.v_RHV.device.type == "cpu" else None
    return in_torch(tokens, states_HDV) if native is None else _in_c(native, tokens, states_HDV)


def in_torch(tokens: Tokens, states_HDV: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """`one_token` in plain torch."""
    each = tokens.v_RHV.shape[1] // tokens.k_RGD.shape[1]
    q_RHD, k_RHD = (t.repeat_interleave(each, 1) for t in (tokens.q_RGD, tokens.k_RGD))
    decayed_RHDV = torch.stack(list(states_HDV)) * tokens.decay_RH[:, :, None, None]
    written_RHV = tokens.v_RHV
    if tokens.rate_RH is not None:
        written_RHV = (written_RHV - read(decayed_RHDV, k_RHD)) * tokens.rate_RH[:, :, None]
    end_RHDV = decayed_RHDV + k_RHD[..., None] * written_RHV[:, :, None]
    return read(end_RHDV, q_RHD), list(end_RHDV.unbind())


class _Step(ctypes.Structure):
    """The struct `step` of recur.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("rows", "heads", "groups", "dim", "width", "threads"))


def _in_c(native: ctypes.CDLL, tokens: Tokens, states_HDV: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    given = [None if part is None else part.contiguous() for part in tokens]
    starts = [state.contiguous() for state in states_HDV]
    if any(part is not None and part.dtype != torch.float32 for part in (*given, *starts)):
        raise ValueError("a recurrence and its states are float32")
    (rows, heads, width), (groups, dim) = tokens.v_RHV.shape, tokens.k_RGD.shape[1:]
    # A tensor for each row: one for all rows is so large that each step would return its memory to the system.
    ends = [torch.empty(heads, dim, width) for _ in starts]
    out_RHV = torch.empty(rows, heads, width)
    places = [np.array([state.data_ptr() for state in part], dtype=np.int64) for part in (starts, ends)]
    step = _Step(rows, heads, groups, dim, width, torch.get_num_threads())
    arguments = [ctypes.c_void_p(place.ctypes.data) for place in places]
    arguments += [ctypes.c_void_p(None if part is None else part.data_ptr()) for part in (*given, out_RHV)]
    native.weft_step(ctypes.byref(step), *arguments)
    return out_RHV, ends
