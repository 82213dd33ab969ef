"""When an operation went through its stages: what the trace of a session is drawn from.

An operation is accepted, waits, is in a worker's hands for one stretch or several (a pass each, for training), is
computed, and is settled. Everything is kept as microseconds since it was accepted, with counts of what shared a
stretch and never who: the row goes to the operation's own organisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

#: How many stretches of one operation are kept, which bounds its row; later ones are only counted.
MAX_STRETCHES = 32


@dataclass
class Stretch:
    """A time in a worker's hands. `pass_id` is 0 for samples: generators batch continuously, without passes.
    `runs` (samplers, for samples) and `organisations` count all that shared it, this one included."""

    pass_id: int
    runs: int
    organisations: int
    tokens: int
    start: datetime
    end: datetime | None = None


@dataclass
class Timings:
    """Filled by the desks and the journal while the operation lives."""

    stretches: list[Stretch] = field(default_factory=list)
    more: int = 0
    computed: datetime | None = None

    def begin(self, stretch: Stretch) -> None:
        """A worker has the operation now. Further slices in the same pass change nothing."""
        if self.stretches and self.stretches[-1].pass_id == stretch.pass_id and self.stretches[-1].end is None:
            return
        if len(self.stretches) == MAX_STRETCHES:
            self.more += 1
        else:
            self.stretches.append(stretch)

    def end(self, at: datetime) -> None:
        """No worker has the operation any more."""
        if self.stretches and self.stretches[-1].end is None:
            self.stretches[-1].end = at

    def done(self, at: datetime) -> None:
        """A worker has answered; the first answer counts."""
        if self.computed is None:
            self.computed = at
            self.end(at)

    def row(self, accepted: datetime, settled: datetime) -> dict[str, Any]:
        """For the operation's row: {"stretches": [[pass, start, end, runs, organisations, tokens], ...], "computed",
        "settled"} and, where some were not kept, "more"."""
        computed = self.computed or settled
        stretches = [
            [s.pass_id, _us(s.start - accepted), _us((s.end or computed) - accepted), s.runs, s.organisations, s.tokens]
            for s in self.stretches
        ]
        facts = {"stretches": stretches, "computed": _us(computed - accepted), "settled": _us(settled - accepted)}
        return facts | ({"more": self.more} if self.more else {})


def _us(span: timedelta) -> int:
    """Microseconds; never negative, since the wall clock may be set back meanwhile."""
    return max(0, span // timedelta(microseconds=1))
