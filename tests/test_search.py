"""Where random searches get their seeds from."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from tests.search import SOAKING, TIMES, chance, examples


def test_only_a_soak_draws_anew() -> None:
    drawn: list[list[int]] = []

    @given(st.integers(0, 2**60))
    def search(number: int) -> None:
        drawn[-1].append(number)

    for _ in range(2):
        drawn.append([])
        search()
    assert (drawn[0] == drawn[1]) == (not SOAKING)
    assert (chance(3).random() == chance(3).random()) == (not SOAKING)


def test_a_soak_searches_for_longer() -> None:
    assert settings.default is not None
    assert settings.default.max_examples == examples(100) == 100 * max(1, TIMES)
