"""What a forward keeps for its backward, and whether that fits into memory; and how running out of memory is
recognised.

Three ways, none of which changes a bit of the result: keep everything; keep the input of each layer and compute the
layer again in the backward (a third more work); and, on a device, keep those inputs in the host's memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

import torch

from workers.model.config import DecoderConfig
from workers.model.planning import machine
from workers.model.planning.check import kept_bytes, kept_on_device

#: The share of the free memory that a forward may fill with what it keeps: with activations, and then, on a device,
#: with logits in what these leave. Gradients and other work need the rest.
SHARE = 0.5

#: Up to this size the free memory is not checked.
ALWAYS_FITS_BYTES = 128 << 20

#: Messages of allocators without an exception class of their own (PyTorch's on a CPU, on Linux and elsewhere).
_SIGNS = ("can't allocate memory: you tried to allocate", "not enough memory: you tried to allocate", "out of memory")


ResultT = TypeVar("ResultT")


class Saving(Enum):
    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


def choose_saving(
    config: DecoderConfig, tokens: int, where: tuple[torch.device, torch.dtype], budget_bytes: int | None = None
) -> Saving:
    """How to run a forward of `tokens` tokens with weights on such a device, of this dtype; `budget_bytes` replaces the
    share of the free memory."""
    device, dtype = where
    per_token = kept_on_device(config, dtype.itemsize) if device.type == "cuda" else kept_bytes(config)
    kept = tokens * config.num_layers * per_token
    if budget_bytes is None:
        if kept <= ALWAYS_FITS_BYTES:
            return Saving.KEEP
        budget_bytes = int(SHARE * free_bytes(device))
    if kept <= budget_bytes:
        return Saving.KEEP
    inputs = tokens * config.num_layers * config.hidden_size * 4
    return Saving.RECOMPUTE if inputs <= budget_bytes or device.type == "cpu" else Saving.OFFLOAD


def free_bytes(device: torch.device) -> int:
    """How much memory can be allocated now; of a host's memory, the share of one of a trainer's ranks on it."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return machine.free_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # set by torchrun


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def with_room(make: Callable[[], ResultT], relieve: Callable[[], object]) -> ResultT:
    """The result of `make`; if there is no memory for it, once more after `relieve` has freed some. Raises OSError if
    that is not enough, since it may be later."""
    why = ""
    for then in (relieve, None):
        try:
            return make()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = str(error)
        if then is not None:  # outside of the handler: the error's frames would keep tensors alive
            then()
    raise OSError(errno.ENOMEM, why)
