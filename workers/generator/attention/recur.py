"""The recurrences of a prefill and of a decode step, from the states that sequences have to those that they get.

A prefill runs block by block, as its attention does (`prefill_attend.py`), so a block comes out with the same bits
whichever piece it is in, and whether the state before it was computed now or kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from workers.generator.attention.prefill_attend import Piece
from workers.generator.cache.prefix_cache import BLOCK_TOKENS
from workers.generator.cache.states import States
from workers.model.recur import Packed, Recurrence, State


class PrefillRecur:
    """The `Recur` of one prefill. `before[i]` are the states where piece i starts, {} at the start of its prompt;
    `reached[i]` those at the block ends `marks[i]`."""

    def __init__(self, pieces: Sequence[Piece], before: Sequence[States], marks: Sequence[Collection[int]]) -> None:
        self._pieces, self._before, self._marks = pieces, before, marks
        self.reached: list[dict[int, States]] = [{} for _ in pieces]
        self._packed: dict[tuple[int, ...], Packed] = {}

    def recur(self, layer: int, recurrence: Recurrence, x_TI: Tensor, *, apart: bool) -> Tensor:
        if recurrence.packs and not apart:
            return self._together(layer, recurrence, x_TI)
        outs, at = [], 0
        for piece, before, marks, reached in zip(self._pieces, self._before, self._marks, self.reached, strict=True):
            state = before[layer] if piece.start else None
            for start, stop in piece.blocks():
                y_NO, state = recurrence.run(x_TI[at : at + stop - start].clone(), state)
                outs.append(y_NO)
                at += stop - start
                if stop in marks:
                    reached.setdefault(stop, {})[layer] = tuple(part.clone() for part in state)
        return torch.cat(outs)

    def _together(self, layer: int, recurrence: Recurrence, x_TI: Tensor) -> Tensor:
        """Compute all pieces together up to their first marks, then up to the second ones, and so on."""
        states: list[State | None] = [
            before[layer] if piece.start else None for piece, before in zip(self._pieces, self._before, strict=True)
        ]
        parts = x_TI.split_with_sizes([piece.stop - piece.start for piece in self._pieces])
        outs: list[list[Tensor]] = [[] for _ in parts]
        at = [piece.start for piece in self._pieces]
        for lengths in self._rounds:
            own = [i for i, length in enumerate(lengths) if length]
            begins = [at[i] - self._pieces[i].start for i in own]
            x = torch.cat([parts[i][begin : begin + lengths[i]] for i, begin in zip(own, begins, strict=True)])
            packed = self._packed.setdefault(lengths, Packed([lengths[i] for i in own], chunk=BLOCK_TOKENS, ends=True))
            y, ends = recurrence.run_packed(x, packed, [states[i] for i in own])
            for i, y_NO, state in zip(own, y.split_with_sizes(packed.lengths), ends, strict=True):
                outs[i].append(y_NO)
                at[i], states[i] = at[i] + lengths[i], state
                if at[i] in self._marks[i]:
                    self.reached[i].setdefault(at[i], {})[layer] = tuple(part.clone() for part in state)
        return torch.cat([y_NO for own_outs in outs for y_NO in own_outs])

    @cached_property
    def _rounds(self) -> list[tuple[int, ...]]:
        """For each round of the computation: the number of tokens that it takes from each piece."""
        each = []
        for piece, marks in zip(self._pieces, self._marks, strict=True):
            cuts = [piece.start, *sorted({mark for mark in marks if piece.start < mark < piece.stop}), piece.stop]
            each.append([stop - start for start, stop in pairwise(cuts)])
        return list(zip_longest(*each, fillvalue=0))


class DecodeRecur:
    """The `Recur` of one prefill. `before[i]` are the states at the start of piece i ({} at the start of a prompt);
    `reached[i]` those at the block ends `marks[i]`."""

    def __init__(self, before: Sequence[States]) -> None:
        self._before = before
        self.after: list[States] = [{} for _ in before]

    def recur(self, layer: int, recurrence: Recurrence, x_TI: Tensor, *, apart: bool) -> Tensor:
        states = [before[layer] for before in self._before]
        if apart:
            each = [
                recurrence.step(x_1I.clone(), [state])
                for x_1I, state in zip(x_TI.split_with_sizes([1] * len(states)), states, strict=True)
            ]
            y_TO, found = torch.cat([y_1O for y_1O, _ in each]), [state for _, (state,) in each]
        else:
            y_TO, found = recurrence.step(x_TI, states)
        for after, state in zip(self.after, found, strict=True):
            after[layer] = state
        return y_TO
