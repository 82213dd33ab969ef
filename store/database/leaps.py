"""Whether the time may be believed. A clock that leaps for a moment (it is set, a machine wakes up, a database moves to
another) would have credit taken back, checkpoints deleted and months closed, and nobody can undo that: whoever does
such things asks here, and does none of them within an hour of a leap. A clock that stays where it is goes on then.

The job `heartbeat` writes every half minute what time it is, and when that had leapt. What it writes last stands, so
that no time that was ahead outlasts its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from sqlalchemy.orm import Session

from store.database.caller import unrestricted
from store.tables import JobRun

#: The job that writes it.
HEARTBEAT = "heartbeat"
#: A leap: that much more, or less, than has passed. What ends when it should, or that much sooner, harms nobody.
LEAP = timedelta(minutes=30)
#: Nothing that cannot be undone is done for so long after one.
SETTLES = timedelta(hours=1)


@dataclass(frozen=True)
class Noted:
    """What was written last: the time, and when it last leapt, if that is not long ago."""

    at: datetime
    leapt_at: datetime | None = None

    def row(self) -> dict[str, int]:
        """In whole seconds, as the result of a job."""
        leapt = {"leapt_at": int(self.leapt_at.timestamp())} if self.leapt_at is not None else {}
        return {"at": int(self.at.timestamp()), **leapt}

    def settles_at(self, now: datetime) -> datetime | None:
        """Until when the time is not believed; None: it is."""
        if abs(now - self.at) > LEAP:
            return now + SETTLES  # and nobody has written it yet
        return self.leapt_at + SETTLES if self.leapt_at is not None and now < self.leapt_at + SETTLES else None


def noted_in(row: JobRun | None) -> Noted | None:
    """What the row of `heartbeat` says; None: nothing yet."""
    if row is None or row.succeeded_at is None:
        return None
    result = row.result or {}
    at, leapt_at = result.get("at"), result.get("leapt_at")
    return Noted(_time(at) if at else row.succeeded_at, _time(leapt_at) if leapt_at else None)


def settles_by(row: JobRun | None, now: datetime) -> datetime | None:
    """Until when nothing that cannot be undone may be done, by the row of `heartbeat`; None: it may."""
    noted = noted_in(row)
    return noted.settles_at(now) if noted is not None else None


def settles_at(session: Session, now: datetime) -> datetime | None:
    """The same, by the row as it is now."""
    with unrestricted(session):  # no row of any organisation's
        return settles_by(session.get(JobRun, HEARTBEAT, populate_existing=True), now)


@dataclass
class Watch:
    """A process's own, by a clock that does not leap: what it wrote itself, and how long ago that is. Of what another
    one wrote it knows no more than that it was lately; before a start that may have been long ago, or the clock leapt
    meanwhile, which is the same from here."""

    ticks: Callable[[], float] = time.monotonic
    _wrote: tuple[datetime, float] | None = field(default=None, init=False)

    def look(self, before: Noted | None, now: datetime) -> Noted:
        """What is to be written now, where `before` is written."""
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
