"""What moved a balance, as one reads it: what each run used on a day is one line, all else is a line of its own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, date

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.console.lists import Pages
from billing.reports import Window, by_day_and, used_days
from store.tables import LedgerEntry

#: Days of a page of the ledger.
DAYS = 14


@dataclass(frozen=True)
class Movement:
    """An entry of the ledger; or, without one, what `run_id` used on that day (None: what belongs to no run)."""

    day: date
    amount_nusd: int
    entry: LedgerEntry | None = None
    run_id: str | None = None


def movements(session: Session, org_id: str, number: int) -> tuple[list[Movement], Pages]:
    """Page `number` of the days with movements, the newest first."""
    others: dict[date, list[LedgerEntry]] = defaultdict(list)
    entries = select(LedgerEntry).where(LedgerEntry.org_id == org_id, LedgerEntry.type != "usage")
    for entry in session.scalars(entries.order_by(LedgerEntry.id.desc())):
        others[entry.at.astimezone(UTC).date()].append(entry)
    days = sorted({*others, *used_days(session, org_id)}, reverse=True)
    pages = Pages(number, len(days), DAYS)
    shown = days[pages.offset : pages.offset + DAYS]
    if not shown:
        return [], pages
    used: dict[date, dict[str | None, int]] = defaultdict(lambda: defaultdict(int))
    for row in by_day_and(session, org_id, Window(shown[-1], shown[0]), "run"):
        used[row.day][row.name] -= row.amount_nusd
    found = []
    for day in shown:
        found += [Movement(day, entry.amount_nusd, entry) for entry in others[day]]
        lines = sorted(used[day].items(), key=lambda line: line[1])
        found += [Movement(day, amount, run_id=run_id) for run_id, amount in lines if amount]
    return found, pages
