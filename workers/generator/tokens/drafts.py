"""Which tokens a decode step tries beyond those that its sequences have (`lookup`), and in which rows.

Drafts take only rows that no sequence needs, so a step never has more rows than the engine has slots, and only pages
that nobody else needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.generator.requests.progress import SequenceProgress
from workers.generator.requests.seating import Seating
from workers.generator.tokens.lookup import Lookup, runs_of


class Drafts:
    def __init__(self, most: int, seating: Seating) -> None:
        """At most `most` tokens are tried for each sequence in a step; 0: none."""
        self._most, self._seating = most, seating

    def make(self, sequences: Sequence[SequenceProgress]) -> None:
        """Give each of the step's sequences its draft."""
        free = self._seating.rows - len(sequences)
        if not self._most or free <= 0:
            drop(sequences)
            return
        for sequence in sequences:
            sequence.draft = self._looked_up(sequence)
        wanted = [sequence for sequence in sequences if sequence.draft]
        for sequence, rows in zip(wanted, shared([len(sequence.draft) for sequence in wanted], free), strict=True):
            del sequence.draft[self._seating.reach(sequence, rows) :]

    def _looked_up(self, sequence: SequenceProgress) -> list[int]:
        owner = sequence.owner
        if sequence.lookup is None:
            prompt = owner.request.prompt
            owner.runs = runs_of(prompt) if owner.runs is None else owner.runs
            sequence.lookup = Lookup(prompt, owner.runs)
        # A row brings the token after it, so the last token that a sequence may have needs no row.
        left = owner.rule.limit - len(sequence.tokens) - 1
        return sequence.lookup.draft(sequence.tokens, min(self._most, left))


def drop(sequences: Sequence[SequenceProgress]) -> None:
    """Let the step try nothing."""
    for sequence in sequences:
        sequence.draft = []


def shared(wanted: Sequence[int], free: int) -> list[int]:
    """Divide `free` among demands: evenly, where what one does not need goes to the others."""
    given = [0] * len(wanted)
    for left, one in zip(range(len(wanted), 0, -1), sorted(range(len(wanted)), key=wanted.__getitem__), strict=True):
        given[one] = min(wanted[one], free // left)
        free -= given[one]
    return given
