"""Recurrences over packed sequences.

A recurrent layer (`parts/gated_delta.py`) hands a `Recur` what it computed of all packed tokens, and the Recur alone
decides where sequences begin and which state they begin with: the trainer's starts every sequence of the batch anew,
the generator's continue what they keep of each sequence.

Shapes: T packed tokens, N consecutive tokens of one sequence, R sequences, I in, O out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

#: What one layer keeps of a sequence. The tensors are never written to: a pass that failed is repeated from the same
#: state, and sequences that begin alike share it.
State = tuple[Tensor, ...]


class Recurrence(Protocol):
    """A recurrent layer. `state` None: of a sequence that begins."""

    def run(self, x_NI: Tensor, state: State | None) -> tuple[Tensor, State]:
        """y_NO, and the state after these tokens. The bits depend on x, the state and N alone."""

    def step(self, x_RI: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """y_RO of one token of each sequence, and their states after it. A row's bits depend on the row alone."""


@runtime_checkable
class Recur(Protocol):
    def recur(self, layer: int, recurrence: Recurrence, x_TI: Tensor, *, apart: bool) -> Tensor:
        """y_TO. `apart`: nothing of several sequences may be computed together (isolation.py)."""


def run_each(recurrence: Recurrence, x_TI: Tensor, lengths: Sequence[int]) -> Tensor:
    """Packed sequences of these lengths, each begun anew and computed on its own."""
    return torch.cat([recurrence.run(x_NI.clone(), None)[0] for x_NI in x_TI.split_with_sizes(list(lengths))])
