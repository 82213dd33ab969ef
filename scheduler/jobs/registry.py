"""All jobs. A job is a function that may run at any time, twice, or not at all for a while: its work is listed in the
database, never in a message, so a second run finds nothing left to do.

Drivers (`scheduler.jobs.embedded`, `scheduler.jobs.production`) decide when; `scheduler.jobs.running` runs one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from billing.prices import PriceList
from store.blobs.contract import Blobs
from store.database.clock import clock
from store.database.db import Database
from store.database.leaps import Watch
from store.settings import Settings

#: Counts of what a job did: {"sent": 3}.
Result = dict[str, int]


@dataclass(frozen=True)
class JobContext:
    """The database, the stores and settings that every job is given; tests pass a `clock` of their own."""

    database: Database
    blobs: Blobs
    settings: Settings
    prices: PriceList
    clock: Callable[[], datetime] | None = None
    watch: Watch = field(default_factory=Watch)

    def now(self) -> datetime:
        """The database's time. One machine with a fast clock would otherwise close months, expire checkpoints and bill
        storage too early. Not to be called within a write."""
        if self.clock is not None:
            return self.clock()
        with self.database.read() as session:
            return clock(session)


Run = Callable[[JobContext], Result]


@dataclass(frozen=True)
class Job:
    """`final`: the job's effects cannot be undone, so it waits while the time is not believed
    (`store.database.leaps`)."""

    name: str
    every_s: float
    run: Run
    final: bool = False


JOBS: dict[str, Job] = {}


def job(name: str, every_s: float, *, final: bool = False) -> Callable[[Run], Run]:
    """Register a function as the job `name`, due `every_s` after it last started, or when it is asked for."""

    def register(run: Run) -> Run:
        if name in JOBS:
            raise ValueError(f"there are two jobs named {name!r}")
        JOBS[name] = Job(name, every_s, run, final)
        return run

    return register
