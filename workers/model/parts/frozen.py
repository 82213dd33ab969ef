"""Weights of the base: parameters that are never trained, uninitialised until a checkpoint is copied into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

#: Makes the tensor of a weight.
MakeWeight = Callable[[torch.dtype, tuple[int, ...]], Tensor]


def _empty(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=dtype)


_make: ContextVar[MakeWeight] = ContextVar("make", default=_empty)


@contextmanager
def weights_from(make: MakeWeight) -> Iterator[None]:
    """Within, the weights of a decoder are tensors that `make` makes, in the order in which its parts ask for them."""
    before = _make.set(make)
    try:
        yield
    finally:
        _make.reset(before)


def frozen(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(_make.get()(dtype, shape), requires_grad=False)
