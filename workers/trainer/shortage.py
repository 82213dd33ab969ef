"""When memory runs out: how it shows, and what the user is told."""

from __future__ import annotations

import torch

from workers.trainer.progress import Part

#: How allocators that have no exception class of their own say it (PyTorch's for the CPU, on Linux and elsewhere).
_SIGNS = ("can't allocate memory: you tried to allocate", "not enough memory: you tried to allocate", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def too_large(part: Part) -> str:
    """The reason why an operation fails whose part did not fit, alone."""
    if part.stop - part.start == 1:
        return (
            f"out of memory: datum {part.start} has {part.tokens} tokens, more than this server can train on at once. "
            "Send shorter sequences, or have the operator give the trainer more memory"
        )
    return (
        f"out of memory: data {part.start} to {part.stop - 1} have {part.tokens} tokens, more than this server can "
        "train on at once. Send shorter sequences, or have the operator lower [trainer] slice_tokens"
    )
