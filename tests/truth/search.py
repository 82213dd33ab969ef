"""Searches for a program and a schedule whose play differs from the patient one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from tests.truth.clock import Stuck
from tests.truth.drawing import draw
from tests.truth.plays import Found, differences, play
from tests.truth.programs import Program, steps_of
from tests.truth.schedules import PATIENT, Schedule
from tests.truth.shrinking import Case, shrink
from tests.truth.world import Ground


class Difference(AssertionError):
    """Two plays of one program do not agree."""


@dataclass
class Bench:
    """Plays in folders of its own, and counts what it has played."""

    ground: Ground
    folder: Path
    statistics: Counter[str] = field(default_factory=Counter)
    _numbers: Any = field(default_factory=itertools.count)

    def play(self, program: Program, schedule: Schedule = PATIENT) -> Found:
        found = play(self.ground, self.folder / f"world{next(self._numbers)}", program, schedule)
        self.statistics["plays"] += 1
        self.statistics += found.statistics
        return found

    def compare(
        self, program: Program, schedule: Schedule, plant: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Play a program patiently, and then under the schedule with the fault that `plant` puts into the code. Raises
        Difference."""
        self.statistics["programs"] += 1
        try:
            patient = self.play(program)
            with plant():
                eager = self.play(program, schedule)
        except (Stuck, AssertionError) as error:
            raise Difference(f"{type(error).__name__}: {error}") from error
        found = differences(patient, eager, damaged=schedule.damages)
        if found:
            raise Difference("\n".join(found))

    def brief(self) -> str:
        found = self.statistics
        deaths = sum(count for name, count in found.items() if " dies " in name)
        faults = sum(count for name, count in found.items() if " fails" in name)
        return (
            f"{found['programs']} programs, {found['operations']} operations, {deaths} deaths, {faults} faults, "
            f"{found['duplicates']} duplicates"
        )

    def report(self) -> str:
        """What was played, by kind."""
        return "\n".join([self.brief(), *(f"  {count:8}  {name}" for name, count in sorted(self.statistics.items()))])


@dataclass(frozen=True)
class Failure:
    """The plays for `number` differ; program and schedule are what is left after shrinking."""

    number: int
    program: Program
    schedule: Schedule
    what: str

    def as_test(self) -> str:
        """The failure as a plain test, to be pasted into tests/truth/found/."""
        return TEMPLATE.format(
            number=self.number,
            what="\n    ".join(self.what.splitlines()[:3]).replace('"""', "'''"),
            program=_written(self.program),
            schedule=_written(self.schedule),
        )


TEMPLATE = '''
def test_number_{number}(bench: Bench) -> None:
    """{what}"""
    program = {program}
    schedule = {schedule}
    bench.compare(program, schedule)
'''


def _written(value: object, indent: str = "    ") -> str:
    """A value as Python source, without the fields that have their defaults."""
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        inner = "".join(f"{indent}    {_written(item, indent)},\n" for item in value)
        return f"(\n{inner}{indent})"
    if not is_dataclass(value):
        return repr(value)
    given = [(field, getattr(value, field.name)) for field in fields(value)]
    shown = [f"{field.name}={_written(item, indent)}" for field, item in given if item != field.default]
    return f"{type(value).__name__}({', '.join(shown)})"


def search(
    bench: Bench,
    numbers: Iterable[int],
    *,
    faults: bool = True,
    tries: int = 150,
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext,
    drawn: Callable[..., Case] = draw,
) -> Failure | None:
    """Play what is `drawn` for each number until two plays differ; that case, shrunk within so many `tries`."""
    for number in numbers:
        case = drawn(number, faults=faults)
        what = _difference(bench, case, plant)
        if what is None:
            continue
        small = shrink(case, lambda smaller: _difference(bench, smaller, plant) is not None, tries)
        return Failure(number, *small, _difference(bench, small, plant) or what)
    return None


def _difference(bench: Bench, case: Case, plant: Callable[[], AbstractContextManager[Any]]) -> str | None:
    if not steps_of(case[0]):
        return None
    try:
        bench.compare(*case, plant)
    except Difference as difference:
        return str(difference)
    return None
