"""The recurrences of a prefill and of a decode step, from the states that sequences have to those that they get.

A prefill runs block by block, as its attention does (`prefill_attend.py`), so a block comes out with the same bits
whichever piece it is in, and whether the state before it was computed now or kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from workers.generator.prefill_attend import Piece
from workers.generator.states import States
from workers.model.recur import Recurrence


class PrefillRecur:
    """The `Recur` of one prefill. `before[i]` are the states where piece i starts, {} at the start of its prompt;
    `reached[i]` those at the block ends `marks[i]`."""

    def __init__(self, pieces: Sequence[Piece], before: Sequence[States], marks: Sequence[Collection[int]]) -> None:
        self._pieces, self._before, self._marks = pieces, before, marks
        self.reached: list[dict[int, States]] = [{} for _ in pieces]

    def recur(self, layer: int, recurrence: Recurrence, x_TI: Tensor, *, apart: bool) -> Tensor:
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


class DecodeRecur:
    """The `Recur` of one decode step: `before[i]` are the states of row i, `after[i]` those it gets."""

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
