"""Queries and keys on a device, between the fused product qkv and attention: each head is normed, rotated and rounded
in one pass, forward and backward, read from where it lies in the product. `Heads` is a `Then` (lora/linear.py);
parts/attention.py makes it.

Shapes: T tokens, H heads, K key-value heads, D numbers of a head, O = (H + 2K) D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from workers.model.gpu import fused_kernels

#: Heads that a block has at a time.
HEADS = 8


class Heads(NamedTuple):
    """One attention's constants: `counts` (H, K), `dim` D, the norms of queries and keys (RMSNorm over a head, arXiv
    1910.07467), their `eps`, the angles (`parts/rotary.py`), the `dtype` of the results, and the bias of the
    product."""

    counts: tuple[int, int]
    dim: int
    norms: tuple[Tensor | None, Tensor | None]
    eps: float
    angles: tuple[Tensor, Tensor]
    dtype: torch.dtype
    bias_O: Tensor | None = None

    def forward(self, y_TO: Tensor) -> tuple[Tensor, ...]:
        """From qkv, float32: q [T, H, D], k and v [T, K, D] in `dtype`, queries and keys normed and rotated. The bias
        is added to qkv in place."""
        if self.bias_O is not None:
            y_TO += self.bias_O
        found = []
        for start, count, norm_D in self._turned():
            out = y_TO.new_empty(len(y_TO), count, self.dim, dtype=self.dtype)
            self._launch(fused_kernels.turn, y_TO[:, start:], count, norm_D, out)
            found.append(out)
        values = y_TO[:, sum(self.counts) * self.dim :].to(self.dtype)
        return *found, values.view(len(values), -1, self.dim)

    def backward(self, y_TO: Tensor, *grads: Tensor) -> Tensor:
        """The gradient of qkv [T, O], rounded once to `dtype`, that of the next products."""
        dy_TO = torch.empty_like(y_TO, dtype=self.dtype)
        for (start, count, norm_D), dout in zip(self._turned(), grads, strict=False):
            own, dout = dy_TO[:, start:], dout.contiguous()
            self._launch(fused_kernels.turn_backward, y_TO[:, start:], count, norm_D, dout, own, own.stride(0))
        dv = grads[-1]
        dy_TO[:, sum(self.counts) * self.dim :] = dv.reshape(len(dv), -1)
        return dy_TO

    def _turned(self) -> list[tuple[int, int, Tensor | None]]:
        """For the queries and for the keys: the first column, the number of heads, and the norm that they get."""
        (h, k), dim = self.counts, self.dim
        return [(0, h, self.norms[0]), (h * dim, k, self.norms[1])]

    def _launch(self, kernel: Any, x_TI: Tensor, heads: int, norm_D: Tensor | None, *rest: Any) -> None:
        cos, sin = (each.contiguous() for each in self.angles)
        norm = norm_D if norm_D is not None else cos
        if len(x_TI):
            kernel[len(x_TI), triton.cdiv(heads, HEADS)](
                x_TI, x_TI.stride(0), norm, cos, sin, *rest, heads, self.dim, cos.shape[-1], self.eps,
                NORMED=norm_D is not None, HEADS=HEADS, BLOCK_D=triton.next_power_of_2(self.dim),
            )  # fmt: skip
