"""The curves that users log for their runs: written in batches, read with as many points as asked for.

A point is (name, step, value); logging a step again replaces its value, so a batch that is sent twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Text, cast, func, select
from sqlalchemy.orm import Session

from store.database.bulk import insert_into
from store.tables import Run, RunCurve, RunMetric

#: How many curves a run, and how many points a curve may have.
MAX_CURVES = 64
MAX_POINTS = 200_000
#: How many rows one statement has: databases limit the number of parameters.
_ROWS = 500


class TooManyPoints(ValueError):
    """A run has reached its limit of curves, or a curve its limit of points."""


@dataclass(frozen=True)
class Point:
    name: str
    step: int
    value: float


@dataclass(frozen=True)
class Curve:
    """`steps`, `values` and `at` (when logged) are parallel lists; `points` counts all points, before thinning."""

    name: str
    points: int
    steps: list[int]
    values: list[float]
    at: list[datetime]


def log_points(session: Session, org_id: str, run_id: str, points: Sequence[Point], at: datetime) -> int:
    """Write `points`; of several with the same name and step the last counts. Returns the number of new steps."""
    session.scalars(select(Run.id).where(Run.id == run_id).with_for_update()).all()  # one writer of a run at a time
    latest = {(point.name, point.step): point.value for point in points}
    curves = {row.name: row for row in session.scalars(select(RunCurve).filter_by(run_id=run_id, org_id=org_id))}
    named: dict[str, list[int]] = {}
    for name, step in latest:
        named.setdefault(name, []).append(step)
    if len(curves.keys() | named.keys()) > MAX_CURVES:
        raise TooManyPoints(f"a run has at most {MAX_CURVES} curves, and {run_id} has {len(curves)}: log fewer names")
    written = 0
    for name, steps in named.items():
        old = _known(session, run_id, name, steps)
        curve = curves.get(name)
        if curve is None:
            curve = RunCurve(run_id=run_id, name=name, org_id=org_id, points=0, last_step=steps[0], last_value=0.0)
            session.add(curve)
        new = len(set(steps) - old)
        if curve.points + new > MAX_POINTS:
            raise TooManyPoints(f"{name}: a curve has at most {MAX_POINTS} points: log every n-th step")
        curve.points += new
        if max(steps) >= curve.last_step:
            curve.last_step = max(steps)
            curve.last_value = latest[name, curve.last_step]
        curve.last_at = at
        written += new
    rows = [
        {"run_id": run_id, "name": name, "step": step, "org_id": org_id, "value": value, "at": at}
        for (name, step), value in latest.items()
    ]
    _upsert(session, rows)
    session.flush()
    return written


def curves_of(session: Session, org_id: str, run_ids: Sequence[str]) -> dict[str, list[RunCurve]]:
    """The curves of each run, by the curves' names, without points."""
    found: dict[str, list[RunCurve]] = {}
    query = select(RunCurve).where(RunCurve.org_id == org_id, RunCurve.run_id.in_(run_ids)).order_by(RunCurve.name)
    for row in session.scalars(query):
        found.setdefault(row.run_id, []).append(row)
    return found


def read_curve(session: Session, org_id: str, run_id: str, name: str, limit: int) -> Curve:
    """One curve by ascending step, thinned to at most `limit` points."""
    # of many timestamps only few are parsed later
    query = select(RunMetric.step, RunMetric.value, cast(RunMetric.at, Text))
    query = query.where(RunMetric.run_id == run_id, RunMetric.name == name, RunMetric.org_id == org_id)
    rows = session.connection().execute(query.order_by(RunMetric.step)).all()
    kept = [rows[index] for index in thin([value for _, value, _ in rows], limit)]
    at = [_instant(text) for _, _, text in kept]
    return Curve(name, len(rows), [step for step, _, _ in kept], [value for _, value, _ in kept], at)


def bests(session: Session, org_id: str, run_ids: Sequence[str], name: str, *, rising: bool) -> dict[str, float]:
    """The best value that each run's curve `name` has had: the highest if `rising`, else the lowest."""
    best = func.max(RunMetric.value) if rising else func.min(RunMetric.value)
    query = select(RunMetric.run_id, best).where(RunMetric.org_id == org_id, RunMetric.run_id.in_(run_ids))
    return {
        run_id: value
        for run_id, value in session.execute(query.where(RunMetric.name == name).group_by(RunMetric.run_id))
    }


def first_reaching(
    session: Session, org_id: str, run_id: str, name: str, target: float, *, rising: bool
) -> RunMetric | None:
    """The first point, by step, at which a curve reaches `target`; None if it never did."""
    reached = RunMetric.value >= target if rising else RunMetric.value <= target
    query = select(RunMetric).where(RunMetric.org_id == org_id, RunMetric.run_id == run_id, RunMetric.name == name)
    return session.scalars(query.where(reached).order_by(RunMetric.step).limit(1)).one_or_none()


def thin(values: Sequence[float], limit: int) -> list[int]:
    """Which of `values` to draw, at most `limit`: the first, the last, and of each of equal stretches between them the
    lowest and the highest, so that no spike is lost."""
    count = len(values)
    if count <= limit:
        return list(range(count))
    if limit < 4:
        return [0, count - 1][:limit]
    stretches = (limit - 2) // 2
    chosen = {0, count - 1}
    for index in range(stretches):
        start = 1 + index * (count - 2) // stretches
        end = 1 + (index + 1) * (count - 2) // stretches
        stretch = values[start:end]
        chosen |= {start + stretch.index(min(stretch)), start + stretch.index(max(stretch))}
    return sorted(chosen)


def _instant(text: str) -> datetime:
    """A stored timestamp; SQLite's text has no time zone, and is UTC."""
    at = datetime.fromisoformat(text)
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


def _known(session: Session, run_id: str, name: str, steps: list[int]) -> set[int]:
    """The steps among these that the curve already has."""
    known: set[int] = set()
    for start in range(0, len(steps), _ROWS):
        part = steps[start : start + _ROWS]
        query = select(RunMetric.step).where(
            RunMetric.run_id == run_id, RunMetric.name == name, RunMetric.step.in_(part)
        )
        known |= set(session.scalars(query))
    return known


def _upsert(session: Session, rows: list[dict[str, object]]) -> None:
    for start in range(0, len(rows), _ROWS):
        row = insert_into(session, RunMetric).values(rows[start : start + _ROWS])
        replaced = {"value": row.excluded.value, "at": row.excluded.at}
        session.execute(row.on_conflict_do_update(index_elements=["run_id", "name", "step"], set_=replaced))
