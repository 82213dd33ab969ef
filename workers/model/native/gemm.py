"""Products with frozen float32 weights on a CPU (gemm.c).

A row comes out with the same bits in any batch. A weight is packed in the order in which it is read: panel by panel in
every call (`product`), which many rows bear, or once (`pack`). That copy doubles the weights' memory, so it is made
only for decoders that only run forward (`Decoder.pack`).

Shapes: P rows, E experts, O out, I in.
"""

from __future__ import annotations

import ctypes
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from workers.model.native.build import library


class Packed:
    """A weight [O, I], or a weight for each expert [E, O, I], in the order in which the kernels read it."""

    def __init__(self, weight: Tensor, native: ctypes.CDLL) -> None:
        self._native, self.version = native, weight._version
        self.experts = len(weight) if weight.dim() == 3 else 1
        self.out, self.inner = out, inner = weight.shape[-2:]
        panel = int(native.weft_panel())
        filled = F.pad(weight.detach().reshape(self.experts, out, inner), (0, 0, 0, -out % panel))
        self._panels = filled.view(-1, panel, inner).transpose(1, 2).contiguous()
        self._weight = _Weight()

    def product(self, x_PI: Tensor, out_PO: Tensor | None = None, ends_E: Tensor | None = None) -> Tensor:
        """y_P = x W^T, in `out_PO` when given. Rows sorted by expert have `ends_E` int32: where those of each end."""
        self.check(x_PI)
        y_PO = x_PI.new_empty(len(x_PI), self.out) if out_PO is None else out_PO
        self._native.weft_gemm(*self.where, _ends(x_PI, ends_E), *rows_at(x_PI), *rows_at(y_PO), None)
        return y_PO

    def check(self, x_PI: Tensor) -> None:
        """ValueError where the kernels cannot read these rows."""
        if x_PI.shape[1] != self.inner or x_PI.stride(1) != 1 or x_PI.dtype != torch.float32:
            got = f"{x_PI.dtype}, {list(x_PI.shape)}"
            raise ValueError(f"rows must be float32 of {self.inner} numbers side by side: {got}")

    @property
    def where(self) -> tuple[object, ctypes.c_void_p]:
        """The weight for the kernels, on the threads in use, and where its panels lie."""
        threads = torch.get_num_threads()
        if self._weight.threads != threads:
            self._weight = _Weight(self.experts, self.inner, self.out, threads)
        return ctypes.byref(self._weight), at(self._panels)


def product(
    x_PI: Tensor, weight: Tensor, *, transposed: bool, out: Tensor | None = None, ends_E: Tensor | None = None
) -> Tensor | None:
    """y_P = x W^T, or x W when `transposed`, of a weight [O, I] or of one for each expert, in `out` when given. Rows
    sorted by expert have `ends_E` int32: where those of each end. None if the kernel cannot serve them."""
    given = (x_PI, weight) if out is None else (x_PI, weight, out)
    plain = all(t.dtype == torch.float32 and t.device.type == "cpu" and t.stride(-1) == 1 for t in given)
    native = library() if plain else None
    if native is None:
        return None
    experts, (wide, inner) = len(weight) if weight.dim() == 3 else 1, weight.shape[-2:]
    if transposed:
        wide, inner = inner, wide
    if x_PI.shape[1] != inner:
        raise ValueError(f"rows must be of {inner} numbers: {list(x_PI.shape)}")
    y_PO = x_PI.new_empty(len(x_PI), wide) if out is None else out
    shape = _Weight(experts, inner, wide, torch.get_num_threads())
    apart = weight.stride(0) if weight.dim() == 3 else 0
    where = _Plain(weight.data_ptr(), weight.stride(-2), apart, transposed)
    both = ctypes.byref(shape), ctypes.byref(where)
    native.weft_mm(*both, _ends(x_PI, ends_E), *rows_at(x_PI), *rows_at(y_PO))
    return y_PO


class _Weight(ctypes.Structure):
    """Weight of gemm.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("experts", "in", "out", "threads"))


class _Plain(ctypes.Structure):
    """Plain of gemm.c."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("apart", ctypes.c_int64),
        ("transposed", ctypes.c_int64),
    )


_PACKED: MutableMapping[Tensor, Packed] = WeakTensorKeyDictionary()


def pack(weight: Tensor) -> bool:
    """Keep a packed copy of a frozen weight for as long as the weight lives. False if the kernel cannot serve it."""
    native = library() if weight.dtype == torch.float32 and weight.device.type == "cpu" else None
    if native is not None and packed(weight) is None:
        _PACKED[weight] = Packed(weight, native)
    return native is not None


def packed(weight: Tensor) -> Packed | None:
    """The packed copy, if there is one and the weight has not been written to since."""
    found = _PACKED.get(weight)
    return found if found is not None and found.version == weight._version else None


def at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def rows_at(tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return at(tensor), ctypes.c_int64(tensor.stride(0))


def _ends(x_PI: Tensor, ends_E: Tensor | None) -> Any:
    return ctypes.byref(ctypes.c_int32(len(x_PI))) if ends_E is None else at(ends_E)
