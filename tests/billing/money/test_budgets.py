"""Budgets: months in UTC, made in the middle of one, alerts, and what a refusal says."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from billing.money.accounts import OutOfMoney, Payer, check_left, period_start
from billing.money.budgets import (
    PERIODS,
    SCOPES,
    BudgetState,
    Period,
    Scope,
    count,
    derived,
    owns,
    remove_budget,
    set_budget,
    states,
)
from billing.money.grants import expire, give
from store import tables
from store.database.db import Database
from store.people.keys import new_key
from store.people.organisations import create_project
from tests.billing.conftest import Till

KEY = Payer("a", "p", 1)
NOVEMBER, DECEMBER = datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)


def put(
    till: Till, limit: int, scope: Scope = "org", scope_id: str = "a", period: Period = "month", hard: bool = True
) -> str:
    return till.database.write_now(
        lambda session: set_budget(session, "a", scope, scope_id, period, limit, hard=hard, now=NOVEMBER)
    ).id


def spent(till: Till, now: datetime = NOVEMBER) -> list[tuple[int, int]]:
    with till.database.read() as session:
        return [(state.spent_nusd, state.held_nusd) for state in states(session, "a", now)]


@pytest.mark.parametrize("year", [2026, 2027, 2028])
def test_months_begin_at_midnight_of_utc_whatever_the_clock_shows(year: int) -> None:
    for month in range(1, 13):
        start = datetime(year, month, 1, tzinfo=UTC)
        for zone in (UTC, timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))):
            assert period_start("month", start.astimezone(zone)) == start
            assert period_start("month", (start + timedelta(days=28) - timedelta.resolution).astimezone(zone)) == start
        assert period_start("month", start - timedelta.resolution) < start


def test_a_month_rolls_over_and_work_belongs_to_the_month_of_its_acceptance(till: Till) -> None:
    put(till, 10)
    late = till.accept(8, at=NOVEMBER)
    assert till.refused(3, at=NOVEMBER).available_nusd == 2
    early = till.accept(10, at=DECEMBER)
    till.end(late, now=DECEMBER, train=8)
    till.end(early, now=DECEMBER, train=4)
    assert (spent(till), spent(till, DECEMBER)) == ([(8, 0)], [(4, 0)])
    assert till.agrees()


def test_a_total_never_rolls_over(till: Till) -> None:
    put(till, 10, period="total")
    till.end(till.accept(8, at=NOVEMBER), train=8)
    refusal = till.refused(3, at=DECEMBER)
    assert (refusal.limit, refusal.available_nusd) == ("the budget of the organisation in total", 2)
    assert till.agrees()


def test_a_budget_made_in_the_middle_of_a_month_knows_what_is_spent_and_held(till: Till) -> None:
    till.end(till.accept(5, KEY, NOVEMBER), now=NOVEMBER, train=4)
    running = till.accept(3, KEY, NOVEMBER)
    till.accept(100, at=NOVEMBER)  # of no project and no key
    put(till, 10, "project", "p")
    put(till, 10, "key", "1")
    assert spent(till) == [(4, 3), (4, 3)]
    with till.database.read() as session:
        assert [state.left_nusd for state in states(session, "a", NOVEMBER)] == [3, 3]
    assert till.refused(4, KEY, NOVEMBER).available_nusd == 3
    till.end(running, train=3)
    assert spent(till) == [(7, 0), (7, 0)]
    assert till.agrees()


@pytest.mark.parametrize(
    ("scope", "scope_id", "name"),
    [("org", "a", "organisation"), ("project", "p", "project p"), ("key", "1", "key 1")],
)
def test_a_refusal_names_its_budget(till: Till, scope: Scope, scope_id: str, name: str) -> None:
    put(till, 5, scope, scope_id)
    till.accept(2, KEY, NOVEMBER)
    refusal = till.refused(4, KEY, NOVEMBER)
    assert refusal.limit == f"the budget of the {name} in 2026-11 (UTC)"
    assert (refusal.needed_nusd, refusal.available_nusd, refusal.held_nusd) == (4, 3, 2)
    assert till.wallet().held_nusd == 2  # nothing is held anywhere for what was refused
    assert till.agrees()


def test_a_month_is_that_of_utc_wherever_the_database_is(till: Till) -> None:
    """In a time zone west of Greenwich, the UTC month begins on the last day of the month before."""
    if till.database.url.startswith("sqlite"):
        pytest.skip("SQLite has no time zone")
    name = till.database.url.rpartition("/")[2]
    set_zone = text(f"ALTER DATABASE {name} SET timezone = 'America/New_York'")
    till.database.write_now(lambda session: session.execute(set_zone))
    with closing(Database(till.database.url)) as there:
        till = replace(till, database=there)
        put(till, 5)
        till.accept(2, KEY, NOVEMBER)
        assert till.refused(4, KEY, NOVEMBER).limit == "the budget of the organisation in 2026-11 (UTC)"
        till.end(till.accept(1, KEY, NOVEMBER), train=1)
        assert spent(till) == [(1, 2)]
        assert till.agrees()


def test_several_budgets_count_each_its_own(till: Till) -> None:
    """Work that several budgets limit stops at the first that is reached."""
    put(till, 100, period="total")
    put(till, 10, "project", "p", "total")
    put(till, 50, "key", "1")
    till.end(till.accept(8, KEY, NOVEMBER), train=8)
    till.end(till.accept(30, Payer("a", "q", 1), NOVEMBER), train=30)
    till.accept(20, Payer("a"), NOVEMBER)
    assert (till.refused(3, KEY, NOVEMBER).scope, till.refused(3, KEY, NOVEMBER).available_nusd) == ("project", 2)
    assert till.refused(13, Payer("a", "q", 1), NOVEMBER).available_nusd == 12
    assert till.refused(43, Payer("a"), NOVEMBER).available_nusd == 42
    assert till.agrees()


def test_the_last_of_it_can_be_had_and_nothing_beyond(till: Till) -> None:
    put(till, 1)
    till.accept(0, at=NOVEMBER)
    till.end(till.accept(1, at=NOVEMBER), train=1)
    till.refused(0, at=NOVEMBER)
    put(till, 0)  # less than is spent
    till.refused(0, at=NOVEMBER)
    assert till.agrees()


def test_what_helps_an_empty_wallet(till: Till) -> None:
    till.mode("prepaid")
    assert till.refused(1).remedy == till.refused(0).remedy == "top up"
    till.database.write_now(lambda session: give(session, "a", 5))
    till.accept(5)
    assert till.refused(5).remedy.startswith("top up, or wait until running operations")
    assert till.refused(6).remedy == "top up"


def test_the_expiry_of_a_grant_takes_nothing_that_is_held_or_owed(till: Till) -> None:
    till.database.write_now(lambda session: give(session, "a", 5, expires_at=NOVEMBER, now=NOVEMBER))
    till.accept(5)
    assert expire(till.database, DECEMBER) == {"expired": 0}
    till.accept(2)  # unlimited: more is held than there is
    assert expire(till.database, DECEMBER) == {"expired": 0}
    assert (till.wallet().balance_nusd, till.wallet().held_nusd) == (5, 7)


@pytest.mark.parametrize("amount_nusd", [0, -1])
def test_a_grant_takes_nothing_away(till: Till, amount_nusd: int) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        till.database.write_now(lambda session: give(session, "a", amount_nusd))


def test_the_smallest_amounts_move_as_others_do(till: Till) -> None:
    """One nano-dollar is held, released, charged beyond a hold, given, and taken back at the moment of its expiry."""
    end = datetime.now(UTC) + timedelta(days=1)
    till.database.write_now(lambda session: give(session, "a", 1, expires_at=end))
    till.database.write_now(lambda session: give(session, "a", 1))
    till.mode("prepaid")
    failed = till.accept(1)
    free = till.accept(0)  # what is held is not spent yet
    till.end(failed)
    assert (till.wallet().balance_nusd, till.wallet().held_nusd) == (2, 0)
    assert expire(till.database, end - timedelta.resolution) == {"expired": 0}
    assert expire(till.database, end) == {"expired": 1}
    till.end(free, train=1)
    assert (till.wallet().balance_nusd, till.wallet().held_nusd) == (0, 0)
    assert {grant.remaining_nusd for grant in till.rows(tables.CreditGrant)} == {0}
    assert till.refused(0).available_nusd == 0
    assert till.agrees()


@pytest.mark.parametrize(
    ("period", "remedy"), [("month", "raise the budget, or wait for the next month"), ("total", "raise the budget")]
)
def test_what_helps_depends_on_the_period(till: Till, period: Period, remedy: str) -> None:
    put(till, 5, period=period)
    assert till.refused(6, at=NOVEMBER).remedy == remedy


def test_what_is_no_operation_needs_money_and_holds_none(till: Till) -> None:
    def left(now: datetime = NOVEMBER) -> None:
        till.database.write_now(lambda session: check_left(session, Payer("a"), now))

    till.database.write_now(lambda session: give(session, "a", 1))
    till.mode("prepaid")
    put(till, 2)
    left()
    till.accept(1, at=NOVEMBER)
    left()  # held is not spent
    assert (till.wallet().held_nusd, spent(till)) == (1, [(0, 1)])
    till.end(till.rows(tables.Operation)[0].id, train=1)
    with pytest.raises(OutOfMoney, match="the prepaid balance"):
        left()
    assert till.agrees()


def test_others_are_not_limited(till: Till) -> None:
    put(till, 0, "key", "1")
    put(till, 0, "project", "p")
    till.accept(5, Payer("a", "q", 2))
    till.accept(5, Payer("b", "p", 1))
    till.refused(1, Payer("a", "p", 2))


def test_raising_and_removing_it_lets_work_go_on(till: Till) -> None:
    budget = put(till, 5)
    till.refused(6, at=NOVEMBER)
    assert put(till, 6) == budget
    op = till.accept(6, at=NOVEMBER)
    assert till.database.write_now(lambda session: remove_budget(session, "b", budget)) is False
    assert till.database.write_now(lambda session: remove_budget(session, "a", budget)) is True
    till.accept(100, at=NOVEMBER)
    till.end(op, train=6)
    assert till.agrees()


def test_alerts_are_recorded_once_at_each_percentage(till: Till) -> None:
    put(till, 100, hard=False)
    for used in (49, 1, 20, 15, 10, 200):
        till.end(till.accept(used, at=NOVEMBER), now=NOVEMBER, train=used)
    found = [(row.pct, row.spent_nusd) for row in till.rows(tables.BudgetAlert)]
    assert sorted(found) == [(50, 50), (80, 85), (100, 295)]
    with till.database.read() as session:
        (state,) = states(session, "a", NOVEMBER)
    assert ([alert.pct for alert in state.alerts], state.left_nusd) == ([50, 80, 100], -195)


def test_an_alert_comes_with_the_very_amount(till: Till) -> None:
    def write(session: Session) -> None:
        set_budget(session, "a", "org", "a", "month", 1000, alert_pcts=[51], now=NOVEMBER)

    till.database.write_now(write)
    for used, told in ((506, []), (3, []), (1, [510]), (1, [510])):
        till.end(till.accept(used, at=NOVEMBER), now=NOVEMBER, train=used)
        assert [row.spent_nusd for row in till.rows(tables.BudgetAlert)] == told


def test_a_budget_below_what_is_spent_alerts_at_once(till: Till) -> None:
    till.end(till.accept(60, at=NOVEMBER), now=NOVEMBER, train=60)
    put(till, 100)
    assert [row.pct for row in till.rows(tables.BudgetAlert)] == [50]


def test_only_what_is_of_the_organisation_gets_a_budget_and_by_its_own_name(till: Till) -> None:
    def write(session: Session) -> list[str]:
        create_project(session, "a", "p")
        create_project(session, "b", "q")
        return [str(new_key(session, org_id)[0].id) for org_id in ("a", "b")]

    keys = till.database.write_now(write)
    names = ["a", "b", "p", "q", *keys, *(f"0{key}" for key in keys), "x", "", "9" * 18, "9" * 19, "\u0661"]
    for org_id, project_id, key_id in zip("ab", "pq", keys, strict=True):
        with till.database.read() as session:
            found = {scope: [name for name in names if owns(session, org_id, scope, name)] for scope in SCOPES}
        assert found == {"org": [org_id], "project": [project_id], "key": [key_id]}


def test_budgets_of_the_whole_organisation_come_first_then_projects_then_keys(till: Till) -> None:
    for scope, scope_id, period in (
        *(("key", "2", "month"), ("project", "q", "total"), ("project", "q", "month"), ("key", "1", "total")),
        *(("project", "0", "total"), ("org", "a", "total"), ("org", "a", "month")),
    ):
        put(till, 10, scope, scope_id, period)  # type: ignore[arg-type]
    till.database.write_now(lambda session: set_budget(session, "b", "org", "b", "month", 10, now=NOVEMBER))
    with till.database.read() as session:
        found = [(of.budget.scope, of.budget.scope_id, of.budget.period) for of in states(session, "a", NOVEMBER)]
        assert [of.budget.scope_id for of in states(session, "b", NOVEMBER)] == ["b"]
    assert found == [
        *(("org", "a", "month"), ("org", "a", "total"), ("project", "0", "total")),
        *(("project", "q", "month"), ("project", "q", "total"), ("key", "1", "total"), ("key", "2", "month")),
    ]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (datetime(2026, 11, 1, tzinfo=UTC), DECEMBER),
        (DECEMBER, datetime(2027, 1, 1, tzinfo=UTC)),
        (datetime(2027, 1, 1, tzinfo=UTC), datetime(2027, 2, 1, tzinfo=UTC)),
        (datetime(2027, 12, 1, tzinfo=UTC), datetime(2028, 1, 1, tzinfo=UTC)),
    ],
    ids=lambda at: f"{at:%Y-%m}",
)
def test_a_month_is_from_its_first_moment_to_before_the_next_one_s(till: Till, start: datetime, end: datetime) -> None:
    """Also for a budget made later, which counts what was accepted before, in and after the month, ended and queued."""
    least = timedelta(microseconds=1)
    for number, at in enumerate((start - least, start, end - least, end, end + least)):
        for payer, times in ((Payer("a", "p", 2), 1), (Payer("b", "q", 3), 3), (Payer("b", "o", 1), 5)):
            till.end(till.accept(times * 10**number, payer, at), now=end, train=times * 10**number)
            till.accept(2 * times * 10**number, payer, at)
    wanted = {("a", "org", "a"): 1, ("a", "project", "p"): 1, ("a", "key", "2"): 1, ("b", "org", "b"): 8}
    wanted |= {("b", "project", "q"): 3, ("b", "key", "3"): 3, ("b", "project", "o"): 5, ("b", "key", "1"): 5}
    wanted |= {("a", "project", "q"): 0, ("a", "key", "1"): 0, ("a", "key", "3"): 0, ("b", "key", "2"): 0}
    for (org_id, scope, scope_id), times in wanted.items():
        budget = tables.Budget(id="x", org_id=org_id, scope=scope, scope_id=scope_id, period="month")
        with till.database.read() as session:
            assert derived(session, budget, start) == (110 * times, 220 * times)
            budget.period = "total"
            assert derived(session, budget, start) == (11111 * times, 22222 * times)


def test_a_budget_made_in_a_new_month_knows_what_was_accepted_before_and_has_not_ended(till: Till) -> None:
    """And it has alerts of the present month only. It has no row of an earlier month without open work: neither of one
    whose work has ended, nor of one in which only another organisation's is open; nor of one to come."""
    old = datetime(2026, 9, 1, tzinfo=UTC)
    till.end(till.accept(9, at=NOVEMBER), now=NOVEMBER, train=9)
    late = till.accept(1, at=NOVEMBER)
    till.end(till.accept(1, at=old), now=old, train=1)
    for org_id, month in (("a", 7), ("b", 8)):
        till.accept(1, Payer(org_id), old.replace(month=month))
    till.database.write_now(lambda session: set_budget(session, "a", "org", "a", "month", 10, now=DECEMBER))
    till.database.write_now(lambda session: set_budget(session, "b", "org", "b", "month", 10, now=DECEMBER))
    known = {period.start.month for period in till.rows(tables.BudgetPeriod)}
    assert known == {7, 8, 11, 12}
    assert len(till.rows(tables.BudgetPeriod)) == 5  # 7, 11 and 12 of one, 8 and 12 of the other
    assert (spent(till), spent(till, DECEMBER)) == ([(9, 1)], [(0, 0)])
    assert spent(till, DECEMBER + timedelta(days=31)) == [(0, 0)]
    assert till.rows(tables.BudgetAlert) == []
    till.end(late, now=DECEMBER, train=1)
    assert (spent(till), spent(till, DECEMBER)) == ([(10, 0)], [(0, 0)])
    assert till.agrees()


@pytest.mark.parametrize("period", PERIODS)
def test_a_budget_knows_what_was_accepted_in_the_month_to_come(till: Till, period: Period) -> None:
    """A replica whose clock is a second ahead at the month's end may have accepted it. Else the books would not agree,
    and the month could not be closed."""
    till.end(till.accept(8, at=DECEMBER), now=DECEMBER, train=8)
    put(till, 100, period=period)
    till.end(till.accept(4, at=DECEMBER), now=DECEMBER, train=4)
    assert spent(till, DECEMBER) == [(12, 0)]
    assert till.agrees()


def test_a_budget_knows_every_month_since_the_first_whose_storage_is_not_metered(till: Till) -> None:
    """Only months of its own organisation, also over the end of a year; a total has one period."""

    def add(session: Session) -> None:
        for number, (org_id, year, month) in enumerate((("a", 2026, 12), ("a", 2026, 11), ("b", 2026, 7))):
            at = datetime(year, month, 1, tzinfo=UTC)
            session.add(
                tables.StorageSpan(
                    id=f"s{number}", org_id=org_id, checkpoint_id=f"c{number}", run_id="r", session_id="s",
                    base_model="m", size_bytes=1, started_at=at, metered_until=at,
                )
            )  # fmt: skip

    till.database.write_now(add)
    till.end(till.accept(9, at=DECEMBER), now=DECEMBER, train=9)
    january = datetime(2027, 1, 1, tzinfo=UTC)
    for period in PERIODS:
        till.database.write_now(lambda session, of=period: set_budget(session, "a", "org", "a", of, 10, now=january))  # type: ignore[misc]
    periods = {(period.start.year, period.start.month): period.spent_nusd for period in till.rows(tables.BudgetPeriod)}
    assert periods == {(2026, 11): 0, (2026, 12): 9, (2027, 1): 0, (1970, 1): 9}


def test_percentages_are_recorded_from_the_very_amount_on(till: Till) -> None:
    """In ascending order, each once, in whatever order they were given; a change of the budget repeats none."""
    till.end(till.accept(510, at=NOVEMBER), now=NOVEMBER, train=510)

    def alerts(limit: int, pcts: list[int]) -> list[int]:
        def write(session: Session) -> BudgetState:
            set_budget(session, "a", "org", "a", "month", limit, alert_pcts=pcts, now=NOVEMBER)
            (state,) = states(session, "a", NOVEMBER)
            return state

        state = till.database.write_now(write)
        assert (state.start, state.budget.hard) == (datetime(2026, 11, 1, tzinfo=UTC), True)
        assert (state.budget.alert_pcts, state.left_nusd) == ([20, 50, 51], limit - 510)
        return [alert.pct for alert in state.alerts]

    assert alerts(1001, [51, 50, 20, 50]) == [20, 50]
    assert alerts(1000, [51, 50, 20]) == [20, 50, 51]


def test_removing_a_budget_removes_its_counts_and_alerts_and_no_others(till: Till) -> None:
    till.end(till.accept(10, KEY, NOVEMBER), now=NOVEMBER, train=10)
    first, gone, last = sorted((put(till, 10), put(till, 10, "key", "1"), put(till, 10, "project", "p")))
    assert till.database.write_now(lambda session: remove_budget(session, "a", gone)) is True
    for table in (tables.BudgetPeriod, tables.BudgetAlert):
        assert {row.budget_id for row in till.rows(table)} == {first, last}
    assert {row.id for row in till.rows(tables.Budget)} == {first, last}


@pytest.mark.parametrize("period", PERIODS)
def test_what_is_spent_after_it_was_counted_is_counted_too(till: Till, period: Period) -> None:
    """But nothing of another project or organisation; and all of a month that has begun since."""
    till.end(till.accept(8, KEY, NOVEMBER), now=NOVEMBER, train=8)
    with till.database.read() as session:
        counted = count(session, "a", "project", "p", period, NOVEMBER)
    for payer in (KEY, Payer("a", "q"), Payer("b", "p")):
        till.end(till.accept(4, payer, NOVEMBER), now=NOVEMBER, train=4)
        till.end(till.accept(2, payer, DECEMBER), now=DECEMBER, train=2)
    till.accept(1, KEY, DECEMBER)

    def write(session: Session) -> None:
        set_budget(session, "a", "project", "p", period, 100, now=DECEMBER, counted=counted)

    till.database.write_now(write)
    found = {row.start: (row.spent_nusd, row.held_nusd) for row in till.rows(tables.BudgetPeriod)}
    november, december = (period_start(period, at) for at in (NOVEMBER, DECEMBER))
    assert found == ({november: (14, 1)} if period == "total" else {november: (12, 0), december: (2, 1)})
    assert till.agrees()
