"""What an MLP computes between its products, forward and backward: SwiGLU (arXiv 2002.05202), its clamped form in
gpt-oss, or squared ReLU (arXiv 2109.08668).

The input is gate and up side by side, or up alone (`GateConfig.parts`). On a CPU SwiGLU is a C kernel (native/gate.c).
Invariant (isolation): all others are elementwise with `steady` sigmoids, so a row's bits do not depend on its
neighbours.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.config import GateConfig
from workers.model.native import gate as native
from workers.model.parts.steady import steady


def activated(config: GateConfig, gate_up: Tensor) -> Tensor:
    """silu(gate) * up. With a limit, (up + 1) * gate * sigmoid(alpha * gate), with gate cut to at most the limit and up
    to between -limit and limit. For up alone relu(up)^2."""
    if not config.gated:
        return F.relu(gate_up).square()
    if config.limit is None and native.serves(gate_up):
        return cast(Tensor, _InC.apply(gate_up))  # type: ignore[no-untyped-call]
    gate, up = gate_up.chunk(2, dim=-1)
    if config.limit is None:
        return steady(F.silu, gate) * up
    gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
    return (up + 1) * (gate * steady(torch.sigmoid, gate * config.alpha))


class Again(Protocol):
    """`activated` computed again for a backward; `h` is its result."""

    h: Tensor

    def backward(self, dh: Tensor, dgate_up: Tensor) -> None:
        """Write the gradient of the input to `dgate_up`, given that of h."""


def again(config: GateConfig, gate_up: Tensor) -> Again:
    if not config.gated:
        return _SquaredRelu(gate_up)
    if config.limit is None and native.serves(gate_up):
        return _Native(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return _SwiGlu(gate, up) if config.limit is None else _Clamped(config.limit, config.alpha, gate, up)


class _InC(torch.autograd.Function):
    """SwiGLU by the C kernels."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return native.swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        dgate_up = torch.empty_like(gate_up)
        native.swiglu_backward(gate_up, dh, dgate_up)
        return dgate_up


class _Native:
    def __init__(self, gate_up: Tensor) -> None:
        self._gate_up, self.h = gate_up, native.swiglu(gate_up)

    def backward(self, dh: Tensor, dgate_up: Tensor) -> None:
        native.swiglu_backward(self._gate_up, dh, dgate_up)


class _SquaredRelu:
    def __init__(self, up: Tensor) -> None:
        self._relu = F.relu(up)
        self.h = self._relu.square()

    def backward(self, dh: Tensor, dgate_up: Tensor) -> None:
        torch.mul(dh, 2 * self._relu, out=dgate_up)


class _SwiGlu:
    def __init__(self, gate: Tensor, up: Tensor) -> None:
        self._gate, self._up = gate, up
        self._sigmoid = steady(torch.sigmoid, gate)
        self._silu = gate * self._sigmoid
        self.h = self._silu * up

    def backward(self, dh: Tensor, dgate_up: Tensor) -> None:
        dgate, dup = dgate_up.chunk(2, dim=-1)
        torch.mul(dh, self._silu, out=dup)
        torch.mul(dh * self._up, self._sigmoid * (1 + self._gate * (1 - self._sigmoid)), out=dgate)


class _Clamped:
    def __init__(self, limit: float, alpha: float, gate: Tensor, up: Tensor) -> None:
        self._gate_within, self._up_within = gate <= limit, (up >= -limit) & (up <= limit)
        self._gate, self._more = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        self._alpha, self._sigmoid = alpha, steady(torch.sigmoid, self._gate * alpha)
        self._glu = self._gate * self._sigmoid
        self.h = self._more * self._glu

    def backward(self, dh: Tensor, dgate_up: Tensor) -> None:
        dgate, dup = dgate_up.chunk(2, dim=-1)
        torch.mul(dh * self._glu, self._up_within, out=dup)
        slope = self._sigmoid * (1 + self._alpha * self._gate * (1 - self._sigmoid))
        torch.mul(dh * self._more * slope, self._gate_within, out=dgate)
