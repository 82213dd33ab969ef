"""Decode steps launched before the tokens of the step before have come, so that a device never waits for the host
between two steps.

The tokens that a step draws stay on the device and are the next step's input. Only the host knows that a sequence has
ended, and it finds out a step late. A token drawn meanwhile for a sequence that has ended, or was set aside, is
dropped: it is neither returned nor billed, and its random number is used again. The key and value that such a row
writes lie behind its sequence's last token; the write is launched before anything for the pages' next holder, which
overwrites it.

Shapes: R rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.generator.forward import DecodePlan
from workers.generator.requests.progress import Row, SequenceProgress
from workers.generator.requests.seating import Seating
from workers.generator.tokens.sampling import Draw, chosen, drawn

log = logging.getLogger(__name__)

#: Launches a step of a plan and returns its logits [R, V]: `DecodeSteps.__call__`.
Launch = Callable[..., Tensor]


class Flight:
    """A step that is under way: its plan, and the tokens it draws, on the device and on their way to the host."""

    def __init__(self, plan: DecodePlan, rows: Sequence[Row], logits_RV: Tensor) -> None:
        self.plan = plan
        self._tokens = [len(row.sequence.tokens) + row.ahead for row in rows]
        numbers = chosen(logits_RV, plan.sampling, [row.uniform for row in rows])
        self.tokens_R = numbers[: len(rows)].long()
        self._here = numbers
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            # A copy that is started later would wait for everything launched by then.
            self._here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._here.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.current_stream().record_event()

    def draws(self) -> list[Draw]:
        """The tokens drawn. Waits for this step, but not for those launched after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return drawn(self._here.tolist(), self.plan.sampling)

    def fits(self, at: int) -> bool:
        """True if the sequence of row `at` may take this step's token: it is seated, has not ended, and has as many
        tokens as it had, or was expected to have, when the step was launched."""
        sequence = self.plan.sequences[at]
        seated = bool(sequence.pages) and sequence.stop_reason is None
        return seated and len(sequence.tokens) == self._tokens[at]


class Ahead:
    """Launches the steps of an engine. At most two are under way, both of one plan."""

    def __init__(self, seating: Seating) -> None:
        self._seating = seating
        #: The step launched before the tokens of the last one were known.
        self.flight: Flight | None = None

    def step(self, plan: DecodePlan, launch: Launch) -> list[Draw]:
        """The draws of the next step of this plan. Before waiting for them, launches the step after it, if every
        sequence certainly needs that."""
        flight, self.flight = self.flight, None
        if flight is None or flight.plan is not plan:
            flight = Flight(plan, plan.rows, launch(plan, None))
        if all(self._goes_on(sequence) for sequence in plan.sequences):
            try:
                self.flight = Flight(plan, plan.next_rows, launch(plan, flight.tokens_R))
            except Exception as error:  # an error is raised again when that step's turn comes
                log.warning("a decode step could not be launched ahead (%s)", error)
        return flight.draws()

    def _goes_on(self, sequence: SequenceProgress) -> bool:
        """True if the sequence certainly needs the next step: its next token cannot be its last, and the one after it
        has a position."""
        room = sequence.owner.rule.limit - len(sequence.tokens)
        return room > 1 and self._seating.reach(sequence, 1) > 0
