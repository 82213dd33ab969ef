"""Elementwise functions that round a number the same way wherever it stands in a tensor (isolation).

torch computes exp, sigmoid and the like with vector instructions, and with other code for a remainder shorter than a
vector, at the end of a tensor and of each thread's share of it. Here tensors are filled up so that no remainder is
left. `isolation.py` tests it at start-up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.lora.linear import own_rows
from workers.model.lora.rows import LoraRows

#: The most numbers that torch computes at a time: several vectors of the widest kind.
_VECTORS = 64
#: The least number of elements in a thread's share of a tensor (at::internal::GRAIN_SIZE).
_GRAIN = 32768


def steady(of: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """of(x), differentiable; `of` must be elementwise."""
    if x.device.type != "cpu":
        return of(x)
    count = x.numel()
    threads = max(1, min(torch.get_num_threads(), -(-count // _GRAIN)))
    filled: Tensor = of(F.pad(x.reshape(-1), (0, -count % (_VECTORS * threads))))
    return filled[:count].view(x.shape)


def sigmoid_of(x_TI: Tensor, lora: LoraRows | None) -> Tensor:
    """sigmoid of packed rows; group by group if rows are `apart`."""
    if lora is not None and lora.apart:
        return torch.cat([torch.sigmoid(own) for own in own_rows(x_TI, lora)])
    return steady(torch.sigmoid, x_TI)
