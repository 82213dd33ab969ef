"""Whether the time may be believed. If a clock leaps for a moment (it is set, a machine wakes up, a database moves to
another), credit would be taken back, checkpoints deleted and months closed, which nobody can undo. Code that does such
things asks here first, and does nothing within an hour of a leap. If the clock does not leap again, it is believed
after that.

The job `heartbeat` writes every half minute the time and when it last leapt. Its last entry counts, so a time that was
ahead is corrected with its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from sqlalchemy.orm import Session

from store.database.caller import unrestricted
from store.tables import JobRun

#: The job that writes the time.
HEARTBEAT = "heartbeat"
#: A leap: the time has moved by this much more, or less, than has passed. Doing something this much too early harms
#: nobody.
LEAP = timedelta(minutes=30)
#: How long after a leap nothing irreversible is done.
SETTLES = timedelta(hours=1)


@dataclass(frozen=True)
class Noted:
    """The last entry: the time, and when it last leapt, if that is recent."""

    at: datetime
    leapt_at: datetime | None = None

    def row(self) -> dict[str, int]:
        """The entry as a job's result, in whole seconds."""
        leapt = {"leapt_at": int(self.leapt_at.timestamp())} if self.leapt_at is not None else {}
        return {"at": int(self.at.timestamp()), **leapt}

    def settles_at(self, now: datetime) -> datetime | None:
        """The time until which the clock is not believed, after a leap; None if it is believed."""
        if abs(now - self.at) > LEAP:
            return now + SETTLES  # a leap that is not written yet
        return self.leapt_at + SETTLES if self.leapt_at is not None and now < self.leapt_at + SETTLES else None


def noted_in(row: JobRun | None) -> Noted | None:
    """The entry in the row of `heartbeat`; None if there is none."""
    if row is None or row.succeeded_at is None:
        return None
    result = row.result or {}
    at, leapt_at = result.get("at"), result.get("leapt_at")
    return Noted(_time(at) if at else row.succeeded_at, _time(leapt_at) if leapt_at else None)


def settles_by(row: JobRun | None, now: datetime) -> datetime | None:
    """The time until which nothing irreversible may be done, by the row of `heartbeat`; None if everything may be
    done."""
    noted = noted_in(row)
    return noted.settles_at(now) if noted is not None else None


def settles_at(session: Session, now: datetime) -> datetime | None:
    """As `settles_by`, from the row as it is now."""
    with unrestricted(session):  # the row belongs to no organisation
        return settles_by(session.get(JobRun, HEARTBEAT, populate_existing=True), now)


@dataclass
class Watch:
    """One process's view, with a clock that does not leap: what it wrote last, and how long ago that is. Of another
    process's entry it only assumes that it is recent. Before a start that may be wrong; from here that looks like a
    leap."""

    ticks: Callable[[], float] = time.monotonic
    _wrote: tuple[datetime, float] | None = field(default=None, init=False)

    def look(self, before: Noted | None, now: datetime) -> Noted:
        """The entry to write now, given the one that was written last (`before`)."""
        ticks, at = self.ticks(), now.replace(microsecond=0)
        wrote, self._wrote = self._wrote, (at, ticks)
        if before is None:
            return Noted(at)
        passed_s = ticks - wrote[1] if wrote is not None and wrote[0] == before.at else 0.0
        if abs(at - before.at - timedelta(seconds=passed_s)) > LEAP:
            return Noted(at, leapt_at=at)
        recent = before.leapt_at is not None and at < before.leapt_at + SETTLES
        return Noted(at, before.leapt_at if recent else None)


def _time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
