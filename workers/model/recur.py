"""Recurrences over packed sequences.

A recurrent layer (`parts/gated_delta.py`) hands a `Recur` what it computed of all packed tokens, and the Recur alone
decides where sequences begin and which state they begin with: the trainer's starts every sequence of the batch anew,
the generator's continue what they keep of each sequence.

Shapes: T packed tokens, N consecutive tokens of one sequence, R sequences, I in, O out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from workers.model.device import sent

#: The state that one layer keeps of a sequence. The tensors are never written to, because a pass that failed is
#: repeated from the same state, and sequences that begin alike share it.
State = tuple[Tensor, ...]


#: How many tokens of a sequence a recurrence computes together, counted from its first.
CHUNK = 64


class Packed:
    """The starts of packed sequences, for kernels that compute all of them at once, in chunks of `chunk` tokens from
    the start of each. `ends`: True if the states after the sequences are wanted."""

    def __init__(self, lengths: Sequence[int], *, chunk: int = CHUNK, ends: bool = False) -> None:
        self.lengths, self.chunk, self.ends = list(lengths), chunk, ends
        self._host = torch.tensor([0, *accumulate(lengths)])
        self._there: Tensor | None = None

    def bounds(self, device: torch.device) -> dict[str, Any]:
        """The arguments by which kernels of fla-core take the sequences. They are the same tensors in every layer,
        since fla-core caches what it derives from them by the tensor."""
        if self._there is None:
            self._there = sent(self._host, device)
        return {"cu_seqlens": self._there, "cu_seqlens_cpu": self._host}


class Recurrence(Protocol):
    """A recurrent layer. A `state` of None belongs to a sequence that begins."""

    #: True if kernels compute the recurrence on this device (gpu/fla.py): then `run_packed` may be called.
    packs: bool

    def run(self, x_NI: Tensor, state: State | None) -> tuple[Tensor, State]:
        """y_NO, and the state after these tokens. The bits depend on x, the state and N alone."""

    def step(self, x_RI: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """y_RO of one token of each sequence, and their states after it. A row's bits depend on the row alone."""

    def run_packed(
        self, x_TI: Tensor, packed: Packed, states: Sequence[State | None] | None
    ) -> tuple[Tensor, list[State]]:
        """y_TO of all sequences and, where asked for, their states after it. `states` None: all begin."""


@runtime_checkable
class Recur(Protocol):
    def recur(self, layer: int, recurrence: Recurrence, x_TI: Tensor, *, apart: bool) -> Tensor:
        """y_TO. `apart`: nothing of several sequences may be computed together (isolation.py)."""


def begun(states: Sequence[State | None] | None, begin: State) -> tuple[Sequence[Tensor] | None, ...]:
    """The parts of states, each of all sequences; `begin` are those of one that begins. None if all begin."""
    if states is None:
        return (None,) * len(begin)
    return tuple(zip(*(state or begin for state in states), strict=True))


def run_each(recurrence: Recurrence, x_TI: Tensor, lengths: Sequence[int] | Packed, *, apart: bool = False) -> Tensor:
    """Packed sequences of these lengths, each begun anew: at once where there are kernels and they need not be kept
    apart, else each computed on its own."""
    packed = lengths if isinstance(lengths, Packed) else Packed(lengths)
    if recurrence.packs and not apart:
        return recurrence.run_packed(x_TI, packed, None)[0]
    return torch.cat([recurrence.run(x_NI.clone(), None)[0] for x_NI in x_TI.split_with_sizes(packed.lengths)])
