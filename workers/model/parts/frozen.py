"""The base's weights: parameters that are never trained, uninitialised until a checkpoint is copied into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

#: Makes the tensor of a weight, of this dtype and shape.
MakeWeight = Callable[[torch.dtype, tuple[int, ...]], Tensor]


def _empty(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=dtype)


_make: ContextVar[MakeWeight] = ContextVar("make", default=_empty)


@contextmanager
def weights_from(make: MakeWeight) -> Iterator[None]:
    """In the block, the weights of a new decoder are tensors made by `make`, called in the fixed order in which the
    parts ask for them (base/shared.py relies on it)."""
    before = _make.set(make)
    try:
        yield
    finally:
        _make.reset(before)


def frozen(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    """A weight of the base, of this dtype and shape."""
    return nn.Parameter(_make.get()(dtype, shape), requires_grad=False)
