"""Movements of a balance as people read them: what each run used on a day is one line, every other entry is a line of
its own.

A page is the next days with movements before a given one, the newest first. However much an organisation has, a page
asks for its own days alone, and shows so many lines of each; the others of a day are one line, so that every page adds
up to the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from itertools import islice
from typing import Literal

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from billing.reports.spending import Window, by_day_and
from store.tables import LedgerEntry, UsageHour

#: How many days a page has; how many runs, and how many other entries, of a day have lines of their own.
DAYS = 14
LINES = 25
#: Written as in the index on these entries: with a parameter in its place, the database would not use the index.
_NOT_USAGE = text("ledger_entries.type <> 'usage'")


@dataclass(frozen=True)
class Movement:
    """One line: a ledger entry; or, without one, what `run_id` used on that day (None: usage of no run); or the sum of
    `others`, runs or entries without a line of their own."""

    day: date
    amount_nusd: int
    entry: LedgerEntry | None = None
    run_id: str | None = None
    others: int = 0
    others_are: Literal["runs", "entries"] = "runs"


def movements(session: Session, org_id: str, before: date | None = None) -> tuple[list[Movement], date | None]:
    """The movements of a page, and where the next one begins (None: this is the last)."""
    days, following = _days(session, org_id, before)
    if not days:
        return [], None
    used: dict[date, dict[str | None, int]] = {day: {} for day in days}
    for row in by_day_and(session, org_id, Window(days[-1], days[0]), "run"):
        used[row.day][row.name] = used[row.day].get(row.name, 0) - row.amount_nusd
    found: list[Movement] = []
    for day in days:
        found += _entries(session, org_id, day)
        found += _runs(day, used[day])
    return found, following


def _days(session: Session, org_id: str, before: date | None) -> tuple[list[date], date | None]:
    """The days of a page; and, if more follow, the day before which they begin. Each day costs two index look-ups."""
    found = list(islice(_backwards(session, org_id, before), DAYS + 1))
    return found[:DAYS], found[DAYS - 1] if len(found) > DAYS else None


def _backwards(session: Session, org_id: str, before: date | None) -> Iterator[date]:
    entries = select(func.max(LedgerEntry.at)).where(LedgerEntry.org_id == org_id, _NOT_USAGE)
    hours = select(func.max(UsageHour.hour)).where(UsageHour.org_id == org_id)
    while True:
        asked = entries, hours
        if before is not None:
            asked = entries.where(LedgerEntry.at < _start(before)), hours.where(UsageHour.hour < _start(before))
        latest = max(filter(None, map(session.scalar, asked)), default=None)
        if latest is None:
            return
        before = latest.astimezone(UTC).date()
        yield before


def _entries(session: Session, org_id: str, day: date) -> list[Movement]:
    start, end = _start(day), _start(day + timedelta(days=1))
    query = select(LedgerEntry).where(LedgerEntry.org_id == org_id, _NOT_USAGE)
    query = query.where(LedgerEntry.at >= start, LedgerEntry.at < end)
    newest = list(session.scalars(query.order_by(LedgerEntry.at.desc(), LedgerEntry.id.desc()).limit(LINES + 1)))
    lines = [Movement(day, entry.amount_nusd, entry) for entry in newest[:LINES]]
    if len(newest) > LINES:
        amounts = query.with_only_columns(LedgerEntry.amount_nusd).execution_options(yield_per=10_000)
        count, total = 0, 0
        for amount in session.scalars(amounts):  # summed in Python: the database's sums can overflow
            count, total = count + 1, total + amount
        rest = total - sum(line.amount_nusd for line in lines)
        lines.append(Movement(day, rest, others=count - LINES, others_are="entries"))
    return lines


def _runs(day: date, used: dict[str | None, int]) -> list[Movement]:
    """One line for each of the most expensive runs, and one for all others."""
    lines = sorted(((run_id, amount) for run_id, amount in used.items() if amount), key=lambda line: line[1])
    shown = [Movement(day, amount, run_id=run_id) for run_id, amount in lines[:LINES]]
    if rest := lines[LINES:]:
        shown.append(Movement(day, sum(amount for _, amount in rest), others=len(rest)))
    return shown


def _start(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)
