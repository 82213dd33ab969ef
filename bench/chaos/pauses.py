"""Evaluates the answers: the clients' pauses, and differences from a calm cycle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Answer:
    """An answer to a client, `at` that second. `place` is its operation's index in the cycle; `value` a digest of the
    whole answer, or the error."""

    at: float
    place: int
    value: str
    failed: bool = False


Answers = Mapping[str, Sequence[Answer]]
#: (client, place in the cycle) -> digest of the calm answer.
Calm = Mapping[tuple[str, int], str]


@dataclass
class Kind:
    """All kills of one kind. `pauses_s`: for each kill, the longest pause of any client. `misbilled`: operations that
    were billed twice, or done and not billed."""

    name: str
    pauses_s: list[float] = field(default_factory=list)
    answers: int = 0
    differences: int = 0
    errors: list[str] = field(default_factory=list)
    misbilled: int = 0


def longest_gap_s(times: Iterable[float], start: float, end: float) -> float:
    """The longest time between two answers within (start, end]."""
    longest, before = 0.0, start
    for at in times:
        if at > end:
            break
        if at > start:
            longest = max(longest, at - before)
        before = at
    return max(longest, end - before)


def median_gap_s(times: Sequence[float]) -> float:
    return median(later - earlier for earlier, later in pairwise(times))


def usual_gaps_s(answers: Answers) -> dict[str, float]:
    """The median gap between answers of each client, while nothing happens."""
    return {name: median_gap_s([answer.at for answer in given if not answer.failed]) for name, given in answers.items()}


def add_kill(kind: Kind, answers: Answers, calm: Calm, usual_s: Mapping[str, float], start: float, end: float) -> None:
    """Count a kill at `start` whose consequences were over at `end`."""
    pauses = []
    for name, given in answers.items():
        good = [answer.at for answer in given if not answer.failed]
        pauses.append(longest_gap_s(good, start, end) - usual_s[name])
        compare(kind, name, given, calm, start, end)
    kind.pauses_s.append(max(pauses))


def compare(kind: Kind, name: str, given: Sequence[Answer], calm: Calm, start: float, end: float) -> None:
    """Compare one client's answers in (start, end] with the calm ones."""
    for answer in given:
        if not start < answer.at <= end:
            continue
        if answer.failed:
            kind.errors.append(f"{name}: {answer.value}")
            continue
        kind.answers += 1
        kind.differences += answer.value != calm[name, answer.place]
