"""Looking for a program and a schedule whose play differs from the patient one."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.truth.clock import Stuck
from tests.truth.plays import Found, differences, play
from tests.truth.programs import Program, steps_of
from tests.truth.schedules import PATIENT, Schedule
from tests.truth.strategies import programs, schedules
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
        """Play a program patiently, and as the schedule has it with the fault that `plant` puts into the code. Raises
        Difference."""
        self.statistics["programs"] += 1
        try:
            patient = self.play(program)
            with plant():
                eager = self.play(program, schedule)
        except (Stuck, AssertionError) as error:
            raise Difference(f"{type(error).__name__}: {error}") from error
        found = differences(patient, eager)
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
    program: Program
    schedule: Schedule
    what: str

    def as_test(self, name: str) -> str:
        """A plain test, to be pasted into tests/truth/found/."""
        return TEMPLATE.format(
            name=name,
            what="\n    ".join(self.what.splitlines()[:3]).replace('"""', "'''"),
            program=_indented(self.program),
            schedule=_indented(self.schedule),
        )


TEMPLATE = '''
def test_{name}(bench: Bench) -> None:
    """{what}"""
    program = {program}
    schedule = {schedule}
    bench.compare(program, schedule)
'''


def _indented(value: object) -> str:
    return pformat(value, width=110).replace("\n", "\n    ")


def search(
    bench: Bench,
    *,
    examples: int,
    seed_number: int | None = None,
    until_s: float | None = None,
    faults: bool = True,
    shrink: bool = True,
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Failure | None:
    """Play random programs. Returns the smallest that was found to differ; None when none of `examples`, or of those
    that were played until the time `until_s` (of time.monotonic), does. Without a `seed_number` the examples are always
    the same."""
    last: list[Failure] = []

    def attempt(program: Program, schedule: Schedule) -> None:
        if until_s is not None and not last and time.monotonic() > until_s:
            return
        if not steps_of(program):
            return
        try:
            bench.compare(program, schedule, plant)
        except Difference as difference:
            last.append(Failure(program, schedule, str(difference)))
            raise

    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    run: Any = given(programs(), schedules(faults))(attempt)
    run = settings(
        max_examples=examples,
        derandomize=seed_number is None,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )(run)
    if seed_number is not None:
        run = seed(seed_number)(run)
    try:
        run()
    except Difference:
        return last[-1]
    return None
