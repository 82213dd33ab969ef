"""What bench/chaos computes from the answers of clients. That it runs is seen by running it (`make chaos`)."""

from __future__ import annotations

import pytest

from bench.chaos.pauses import Answer, Kind, add_kill, compare, longest_gap_s, usual_gaps_s

CALM = {("a", 0): "x", ("a", 1): "y", ("b", 0): "z"}


def answers(*times: float, place: int = 0, value: str = "x") -> list[Answer]:
    return [Answer(at, place, value) for at in times]


@pytest.mark.parametrize(
    ("times", "gap"),
    [
        ([9.0, 11.0, 12.0, 20.0, 21.0, 29.5], 8.5),
        ([9.9, 10.5, 11.0], 19.0),  # no more answers
        ([], 20.0),  # none at all
        ([9.0, 10.1, 19.0, 29.9], 10.9),
        ([9.0, 29.0, 60.0], 20.0),  # answers after the end do not count
    ],
)
def test_the_longest_gap_of_a_client(times: list[float], gap: float) -> None:
    """The kill is at 10 s, and its window ends at 30 s."""
    assert longest_gap_s(times, 10.0, 30.0) == pytest.approx(gap)


def test_a_pause_is_that_of_the_client_who_waited_longest_less_what_is_usual() -> None:
    given = {"a": answers(1, 2, 3, 4, 10.5, 17, 18, 19, 20), "b": answers(1, 3, 5, 7, 9, 12, 19.5, value="z")}
    kind = Kind("k")
    usual_s = usual_gaps_s({"a": given["a"][:4], "b": given["b"][:5]})
    assert usual_s == {"a": 1.0, "b": 2.0}
    add_kill(kind, given, CALM, usual_s, 10.0, 20.0)
    assert kind.pauses_s == [pytest.approx(5.5)]  # a: 6.5 - 1, b: 7.5 - 2
    assert (kind.answers, kind.differences, kind.errors) == (7, 0, [])


def test_answers_are_compared_with_those_of_the_calm_run_at_their_place() -> None:
    kind = Kind("k")
    given = [Answer(9, 0, "old"), Answer(11, 0, "x"), Answer(12, 1, "x"), Answer(13, -1, "gone", failed=True)]
    compare(kind, "a", given, CALM, 10.0, 20.0)
    assert (kind.answers, kind.differences, kind.errors) == (2, 1, ["a: gone"])
