"""Weights of the base: parameters that are never trained, uninitialised until a checkpoint is copied into them."""

from __future__ import annotations

import torch
from torch import nn


def frozen(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
