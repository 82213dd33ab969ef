"""Functions of single numbers that round a number the same way wherever it stands in a tensor.

torch computes exp, sigmoid and their like with vectors, and with other code where less than a vector is left over: at
the end of a tensor, and of each thread's share of it. Filled up, there is nothing left over. `isolation.py` tests it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.lora.linear import own_rows
from workers.model.lora.rows import LoraRows

#: How many numbers torch computes at a time, at most: several vectors of the widest kind.
_VECTORS = 64
#: A thread's share of a tensor is at least so many numbers (at::internal::GRAIN_SIZE).
_GRAIN = 32768


def steady(of: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """of(x), differentiable; `of` computes every number by itself."""
    if x.device.type != "cpu":
        return of(x)
    count = x.numel()
    threads = max(1, min(torch.get_num_threads(), -(-count // _GRAIN)))
    filled: Tensor = of(F.pad(x.reshape(-1), (0, -count % (_VECTORS * threads))))
    return filled[:count].view(x.shape)


def sigmoid_of(x_TI: Tensor, lora: LoraRows | None) -> Tensor:
    """sigmoid of packed rows, group by group where rows are kept apart."""
    if lora is not None and lora.apart:
        return torch.cat([torch.sigmoid(own) for own in own_rows(x_TI, lora)])
    return steady(torch.sigmoid, x_TI)
