"""How running out of memory is recognised."""

from __future__ import annotations

import torch

#: Messages of allocators without an exception class of their own (PyTorch's on a CPU, on Linux and elsewhere).
_SIGNS = ("can't allocate memory: you tried to allocate", "not enough memory: you tried to allocate", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
