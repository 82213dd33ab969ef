"""Spending reports: by day, kind, model, project, key, user and run. Read only.

Read from the hourly sums, which are updated in the commit of the usage itself, so any grouping agrees with the ledger
to the nano-dollar. Days are UTC.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from itertools import accumulate
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Select, case, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from store.tables import UsageEvent, UsageHour
from store.tables.base import any_index_but, halves, whole

Dimension = Literal["kind", "model", "project", "key", "user", "run"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
#: Kinds whose quantity is tokens.
TOKEN_KINDS = ("train", "prefill", "cached_prefill", "sample")
#: Kinds that users come for; prompts are read only for their sake.
GOT_KINDS = ("train", "sample")
#: The columns to select for `both`: halves of the sums of quantity and amount.
SUMS = halves(UsageHour.quantity, UsageHour.amount_nusd)


@dataclass(frozen=True)
class Spent:
    tokens: int = 0
    amount_nusd: int = 0


@dataclass(frozen=True)
class Window:
    """Whole days, `last` included, and filters such as `("run", id)`; the value None matches rows without one."""

    first: date
    last: date
    match: tuple[tuple[Dimension, str | None], ...] = ()

    @property
    def days(self) -> list[date]:
        return [self.first + timedelta(days=number) for number in range((self.last - self.first).days + 1)]


@dataclass(frozen=True)
class DayRow:
    day: date
    kind: str
    quantity: int
    amount_nusd: int


@dataclass(frozen=True)
class ShareRow:
    """What one model (or project, key, ...), called `name`, used of one kind. `name` is None for usage without a
    project (key, ...)."""

    name: str | None
    kind: str
    quantity: int
    amount_nusd: int


@dataclass(frozen=True)
class DayShareRow:
    day: date
    name: str | None
    kind: str
    quantity: int
    amount_nusd: int


def last_days(count: int, now: datetime | None = None) -> Window:
    """A window that ends today."""
    today = (now or datetime.now(UTC)).astimezone(UTC).date()
    return Window(today - timedelta(days=count - 1), today)


def this_month(now: datetime | None = None) -> Window:
    today = (now or datetime.now(UTC)).astimezone(UTC).date()
    return Window(today.replace(day=1), today)


def by_day(session: Session, org_id: str, window: Window) -> list[DayRow]:
    """Cost of each day by kind, in order; days without usage have no row."""
    columns = (_day(session), UsageHour.kind)
    rows = session.execute(_within(org_id, window, *columns).group_by(*columns))
    found = [DayRow(_date(at), kind, *both(*sums)) for at, kind, *sums in rows]
    return sorted(found, key=lambda row: (row.day, row.kind))


def in_window(rows: Iterable[DayRow], window: Window) -> list[DayRow]:
    """The condition for the days of `window`."""
    return [row for row in rows if window.first <= row.day <= window.last]


def by_dimension(session: Session, org_id: str, window: Window, dimension: Dimension) -> list[ShareRow]:
    """Cost by the values of `dimension` and by kind, in no particular order."""
    column = _column(dimension)
    rows = session.execute(_within(org_id, window, column, UsageHour.kind).group_by(column, UsageHour.kind))
    return [ShareRow(str(value) if value else None, kind, *both(*sums)) for value, kind, *sums in rows]


def by_day_and(session: Session, org_id: str, window: Window, dimension: Dimension) -> list[DayShareRow]:
    """Cost of each day by the values of `dimension` and by kind, in order."""
    columns = (_day(session), _column(dimension), UsageHour.kind)
    rows = session.execute(_within(org_id, window, *columns).group_by(*columns))
    found = [
        DayShareRow(_date(at), str(value) if value else None, kind, *both(*sums)) for at, value, kind, *sums in rows
    ]
    return sorted(found, key=lambda row: (row.day, row.name or "", row.kind))


def total(session: Session, org_id: str, window: Window) -> int:
    """All that was spent in a window, in nano-USD."""
    return sum(row.amount_nusd for row in by_dimension(session, org_id, window, "kind"))


def per_mtok_got(rows: Iterable[DayRow | ShareRow | DayShareRow]) -> int | None:
    """The price of a million tokens trained or sampled, in nano-USD: everything that was paid, prompts and storage too,
    divided by these tokens. None if there are none."""
    paid = got = 0
    for row in rows:
        paid += row.amount_nusd
        got += row.quantity if row.kind in GOT_KINDS else 0
    return paid * 10**6 // got if got else None


def of_runs(session: Session, org_id: str, run_ids: Sequence[str]) -> dict[str, Spent]:
    """The usage of runs so far, including samples from their weights."""
    spent: dict[str, Spent] = {}
    columns = (UsageHour.run_id, UsageHour.kind)
    query = select(*columns, *SUMS).where(UsageHour.org_id == org_id, UsageHour.run_id.in_(run_ids))
    for run_id, kind, *sums in session.execute(query.group_by(*columns)):
        quantity, amount = both(*sums)
        so_far = spent.get(run_id, Spent())
        tokens = so_far.tokens + (quantity if kind in TOKEN_KINDS else 0)
        spent[run_id] = Spent(tokens, so_far.amount_nusd + amount)
    return spent


def spent_by(session: Session, org_id: str, run_id: str, times: Sequence[Sequence[datetime]]) -> list[list[Spent]]:
    """How much a run had used by each of `times`."""
    event = UsageEvent
    tokens_of = case((event.kind.in_(TOKEN_KINDS), event.quantity), else_=0)
    query = select(event.recorded_at, *halves(tokens_of, event.amount_nusd))
    query = query.where(any_index_but(event.org_id) == org_id, event.run_id == run_id).group_by(event.recorded_at)
    rows = [(at, *both(*sums)) for at, *sums in session.execute(query.order_by(event.recorded_at))]
    instants = [at for at, _, _ in rows]
    tokens = [0, *accumulate(quantity for _, quantity, _ in rows)]
    amounts = [0, *accumulate(amount for _, _, amount in rows)]
    return [
        [Spent(tokens[index], amounts[index]) for index in (bisect_right(instants, at) for at in series)]
        for series in times
    ]


def spent_until(session: Session, org_id: str, run_id: str, at: datetime) -> Spent:
    """How much a run had used by `at`, as in `spent_by`."""
    event = UsageEvent
    query = select(event.kind, *halves(event.quantity, event.amount_nusd)).where(
        any_index_but(event.org_id) == org_id, event.run_id == run_id, event.recorded_at <= at
    )
    rows = [(kind, *both(*sums)) for kind, *sums in session.execute(query.group_by(event.kind))]
    return Spent(
        sum(quantity for kind, quantity, _ in rows if kind in TOKEN_KINDS), sum(amount for _, _, amount in rows)
    )


def narrowed(window: Window, dimension: Dimension, value: str | None) -> Window:
    """The window with one more filter."""
    return replace(window, match=(*window.match, (dimension, value)))


def _within(org_id: str, window: Window, *columns: Any) -> Select[Any]:
    start = datetime.combine(window.first, time(), UTC)
    end = datetime.combine(window.last + timedelta(days=1), time(), UTC)
    query = select(*columns, *SUMS)
    query = query.where(UsageHour.org_id == org_id, UsageHour.hour >= start, UsageHour.hour < end)
    for dimension, value in window.match:
        query = query.where(_column(dimension) == _stored(dimension, value))
    return query


def _column(dimension: Dimension) -> InstrumentedAttribute[Any]:
    names = {"model": "base_model", "project": "project_id", "key": "key_id", "user": "user_id", "run": "run_id"}
    column: InstrumentedAttribute[Any] = getattr(UsageHour, names.get(dimension, dimension))
    return column


def _stored(dimension: Dimension, value: str | None) -> str | int:
    """The value as stored in the table: "" or 0 for none."""
    if dimension != "key":
        return value or ""
    return int(value) if value and value.isdecimal() and len(value) < 19 else 0 if value is None else -1


def both(*sums: Any) -> tuple[int, int]:
    """Quantity and amount, put together from the four sums of their `halves`."""
    return whole(*sums[:2]), whole(*sums[2:])


def _day(session: Session) -> ColumnElement[Any]:
    if session.get_bind().dialect.name == "sqlite":
        return func.date(UsageHour.hour)
    return func.date(func.timezone("UTC", UsageHour.hour))


def _date(value: date | str) -> date:
    return value if isinstance(value, date) else date.fromisoformat(value)
