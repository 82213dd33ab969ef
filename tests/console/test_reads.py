"""How much the pages read: the number of statements, their plans and their rows; time would depend on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, event, func, select

from store.curves import Point, log_points
from store.tables import UsageEvent
from tests.console.conftest import Console
from tests.console.test_money import sign_in_by_link

Statement = tuple[str, Any]


@contextmanager
def statements() -> Iterator[list[Statement]]:
    """The statements that databases get meanwhile, with their parameters."""
    asked: list[Statement] = []

    def note(_connection: Any, _cursor: Any, text: str, values: Any, _context: Any, _many: bool) -> None:
        asked.append((text, values))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def asked_by(console: Console, path: str, table: str) -> list[Statement]:
    with statements() as asked:
        console.get(path)
    return [(text, values) for text, values in asked if f"FROM {table}" in text]


def rows_of(console: Console, statement: Statement, before: str = "") -> list[Any]:
    text, values = statement
    with console.database.read() as session:
        return list(session.connection().exec_driver_sql(before + text, values))


def compared(console: Console) -> str:
    return "&".join(f"run={run}" for run in console.made.runs[:5])


def test_what_a_run_did_is_not_looked_for_among_all_that_its_organisation_did(console: Console) -> None:
    """Curves against cost, comparing, and the health of runs use an index on more than the organisation."""
    console.sign_in()
    run = console.made.runs[0]
    paths = [f"/runs/{run}", f"/runs/{run}/live", f"/compare?{compared(console)}", "/queues"]
    of_run = {"usage_events": ("run_id=?", "recorded_at>?"), "operations": ("lane=?", "finished_at>?", "(id=?)")}
    for table, narrow in of_run.items():
        found = [statement for path in paths for statement in asked_by(console, path, table)]
        plans = [row[3] for statement in found for row in rows_of(console, statement, "EXPLAIN QUERY PLAN ")]
        looked = [plan for plan in plans if f" {table} " in plan]
        assert len(looked) >= 3
        assert [plan for plan in looked if not any(part in plan for part in narrow)] == []


def test_ownership_reads_the_hours_that_it_tells_of(console: Console) -> None:
    sign_in_by_link(console, operator=True)
    for table, narrow in (("usage_hourly", "hour>? AND hour<?"), ("operations", "finished_at>? AND finished_at<?")):
        (statement,) = asked_by(console, "/ownership?days=1", table)
        plans = [row[3] for row in rows_of(console, statement, "EXPLAIN QUERY PLAN ")]
        assert any(table in plan and narrow in plan for plan in plans), plans


def test_a_curve_against_cost_reads_a_row_for_each_settlement(console: Console) -> None:
    """And not a row for each kind of usage in it."""
    console.sign_in()
    run = console.made.runs[0]
    (statement,) = asked_by(console, f"/runs/{run}/live", "usage_events")
    with console.database.read() as session:
        instants = select(func.count(UsageEvent.recorded_at.distinct()), func.count()).filter_by(run_id=run)
        settlements, events = session.execute(instants).one()
    assert len(rows_of(console, statement)) == settlements < events


def test_the_days_of_a_page_are_read_once(console: Console) -> None:
    """One reading serves the chart, the month, its forecast and the rate of spending."""
    console.sign_in()
    for path, times in (("/", 1), ("/billing", 2), ("/usage", 2)):  # the ledger by run, and the split, ask once more
        asked = [text for text, _ in asked_by(console, path, "usage_hourly") if "usage_hourly.hour >=" in text]
        assert len(asked) == times, path
        assert "GROUP BY date(" in asked[0], path  # a row for each day, and not for each hour


def test_runs_beside_each_other_are_looked_up_once(console: Console) -> None:
    console.sign_in()
    path = f"/compare?{compared(console)}"
    assert len(asked_by(console, path, "usage_hourly")) == 1


def test_long_curves_are_sent_as_they_are_drawn(console: Console) -> None:
    """With their spikes, however many points were logged."""
    run = console.made.runs[1]
    points = [Point("reward", step, 9.0 if step == 1777 else step % 7 / 7) for step in range(3000)]
    console.database.write_now(lambda session: log_points(session, console.made.org_id, run, points, datetime.now(UTC)))
    console.sign_in()
    (live,) = console.http.get(f"/console/runs/{run}/live").json()["curves"]
    (beside,) = console.http.get(f"/console/compare/curves?run={run}").json()["runs"][0]["curves"]
    for curve, most in ((live, 500), (beside, 150)):
        assert curve["points"] == 3000
        assert most - 4 <= len(curve["steps"]) <= most
        assert 1777 in curve["steps"]
