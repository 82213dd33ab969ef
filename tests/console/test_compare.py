"""Compared runs agree with the curves and the ledger they are computed from; their hyperparameters and notes."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.console.formats import lasts
from api.console.pages.runs.compare import DRAWN, _all_reach
from store.tables import AuditEntry, Operation, Organisation, Run, RunMetric, UsageEvent
from store.tables.work import MAX_NOTES
from tests.console.conftest import Console
from tests.console.test_pages import amounts


def part(page: str, name: str) -> str:
    return page[page.index(f'id="{name}"') :].split("</section>")[0]


def cells(row: str) -> list[str]:
    return [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", row, re.S)]


class TestCompare:
    def test_what_it_took_to_reach_a_value(self, console: Console) -> None:
        """The first step that reached the value, and the run's recorded cost and time until then."""
        console.sign_in()
        runs = [console.made.runs[number] for number in (0, 3)]
        page = console.get(f"/compare?run={runs[0]}&run={runs[1]}&metric=reward&target=0.6")
        rows = part(page, "reached").split("<tbody>")[1].split("</tr>")
        for run, row in zip(runs, rows, strict=False):
            with console.database.read() as session:
                points = session.scalars(select(RunMetric).filter_by(run_id=run).order_by(RunMetric.step)).all()
                first = next(point for point in points if point.name == "reward" and point.value >= 0.6)
                events = session.scalars(select(UsageEvent).filter_by(run_id=run)).all()
            cost = sum(event.amount_nusd for event in events if event.recorded_at <= first.at)
            tokens = sum(event.quantity for event in events if event.recorded_at <= first.at)
            assert amounts(row) == [cost]
            assert cells(row)[2] == str(first.step)
            assert f'<data value="{tokens}"' in row

    def test_what_falls_is_asked_for_at_most(self, console: Console) -> None:
        console.sign_in()
        both = f"run={console.made.runs[0]}&run={console.made.runs[3]}"
        found = part(console.get(f"/compare?{both}&metric=loss&target=1"), "reached")
        assert "loss ≤ 1" in found
        assert "loss ≥ 1" in part(console.get(f"/compare?{both}&metric=loss&direction=up&target=1"), "reached")
        assert "never was at most -5" in part(console.get(f"/compare?{both}&metric=loss&target=-5"), "reached")
        assert "has no curve reward" in part(console.get(f"/compare?{both}&run={console.made.runs[1]}"), "reached")

    def test_it_counts_as_requests_do(self, console: Console) -> None:
        def limit(session: Session) -> None:
            session.get_one(Organisation, console.made.org_id).requests_per_minute = 2

        console.database.write_now(limit)
        console.sign_in()
        found = [console.http.get(f"/console/compare{what}").status_code for what in ("", "/curves", "")]
        assert found == [200, 200, 429]

    def test_hyperparameters_that_differ(self, console: Console) -> None:
        first, other = console.made.runs[0], console.made.runs[1]

        def change(session: Session) -> None:
            session.get_one(Run, other).rank = 8
            step = session.scalars(select(Operation).filter_by(lane=first, kind="optim_step").limit(1)).one()
            step.plan = {**step.plan, "settings": {**step.plan["settings"], "learning_rate": 8e-5}}

        console.database.write_now(change)
        console.sign_in()
        page = console.get(f"/compare?run={first}&run={other}")
        different, same = part(page, "different").split("<details")
        rows = {row[0]: row[1:] for row in map(cells, different.split("</tr>")) if row}
        assert rows["rank"] == ["32", "8"]
        assert rows["batch_size"] == ["128", "64"]
        assert rows["learning rate"][1] == "–"
        assert "8e-05" in rows["learning rate"][0]
        assert "base model" in same

    def test_two_to_five_of_ones_own(self, console: Console) -> None:
        console.sign_in()
        runs = console.made.runs
        for few in ("", f"?run={runs[0]}", f"?run={runs[0]}&run={runs[0]}"):
            page = console.get(f"/compare{few}")
            assert "Choose runs" in page
            assert "What it took" not in page
        six = "&".join(f"run={run}" for run in runs)
        assert "2 to 5 runs can be compared, not 6" in console.get(f"/compare?{six}", status=400)
        for foreign in ("rival-session:train:0", "nothing"):
            console.get(f"/compare?run={runs[0]}&run={foreign}", status=404)
            assert console.http.get(f"/console/compare/curves?run={runs[0]}&run={foreign}").status_code == 404
        console.get(f"/compare?run={runs[0]}&run={runs[1]}&target=nan", status=422)

    def test_the_curves_are_the_apis(self, console: Console) -> None:
        console.sign_in()
        runs = [console.made.runs[number] for number in (3, 0)]
        found = console.http.get(f"/console/compare/curves?run={runs[0]}&run={runs[1]}").json()["runs"]
        assert [each["id"] for each in found] == runs
        for each in found:
            assert each["curves"] == console.api(f"weft/runs/{each['id']}/metrics?points={DRAWN}")["curves"]


@pytest.mark.parametrize(
    ("best", "rising", "value"),
    [
        ({"a": 0.81234, "b": 0.91}, True, 0.812),
        ({"a": 0.8126, "b": 0.9}, True, 0.8126),
        ({"a": 1.234, "b": 2.0}, False, 2.0),
        ({"a": 0.31249}, False, 0.31249),
        ({"a": -0.5}, True, -0.5),
        ({}, True, None),
    ],
)
def test_a_value_that_all_have_reached(best: dict[str, float], rising: bool, value: float | None) -> None:
    assert _all_reach(best, rising) == value
    assert value is None or all(each >= value if rising else each <= value for each in best.values())


class TestARun:
    def test_hyperparameters(self, console: Console) -> None:
        run = console.made.runs[0]

        def change(session: Session) -> None:
            row = session.get_one(Run, run)
            row.user_metadata = {**row.user_metadata, "rank": "<i>mine</i>", "nested": {"a": [1]}, "long": "x" * 999}
            steps = session.scalars(select(Operation).filter_by(lane=run, kind="optim_step").order_by(Operation.seq))
            for step, rate in zip(steps, (1e-6, 2e-4, 1e-4), strict=False):
                step.plan = {**step.plan, "settings": {**step.plan["settings"], "learning_rate": rate}}

        console.database.write_now(change)
        console.sign_in()
        page = console.get(f"/runs/{run}")
        shown = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
        assert shown["learning rate"] == "1e-06 → 4e-05, at most 0.0002"
        assert shown["beta1"] == "0.9"
        assert shown["rank"] == "32"
        assert shown["rank (metadata)"] == "&lt;i&gt;mine&lt;/i&gt;"
        assert shown["nested"] == "{&#34;a&#34;: [1]}"
        assert shown["long"] == "x" * 200 + "…"

    def test_notes(self, console: Console) -> None:
        made = console.made
        mine, theirs = made.runs[0], made.runs[1]  # the member's, and the owner's
        console.sign_in("member")
        console.press(f"/runs/{mine}/notes", notes="<script>alert(1)</script>\r\nsecond line")
        page = console.get(f"/runs/{mine}")
        assert "&lt;script&gt;alert(1)&lt;/script&gt;\nsecond line</textarea>" in page
        assert "Keep notes" not in console.get(f"/runs/{theirs}")
        console.press(f"/runs/{theirs}/notes", status=403, notes="x")
        console.press(f"/runs/{mine}/notes", status=400, notes="x" * (MAX_NOTES + 1))
        console.press(f"/runs/{mine}/notes", notes="é\r\n" * (MAX_NOTES // 2))  # as browsers send lines
        console.press("/runs/rival-session:train:0/notes", status=404, notes="x")
        console.sign_in("viewer")
        assert "Keep notes" not in console.get(f"/runs/{mine}")
        console.press(f"/runs/{mine}/notes", status=403, notes="x")
        with console.database.read() as session:
            entries = session.scalars(select(AuditEntry).filter_by(event="run_notes_set")).all()
        assert [entry.target for entry in entries] == [mine, mine]
        assert {entry.actor for entry in entries} == {f"user:{made.users['member']}"}


def test_a_time_is_read() -> None:
    for seconds, text in ((0, "0 s"), (59, "59 s"), (3600, "1 h"), (3661, "1 h 1 min"), (200_000, "2 d 7 h")):
        assert lasts(timedelta(seconds=seconds)) == f'<data value="{seconds}">{text}</data>'
