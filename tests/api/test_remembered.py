"""Results of look-ups are remembered for seconds, and no longer than they are of use."""

from __future__ import annotations

import pytest

from api.state import remembered
from api.state.remembered import FIRST_LOOK, REMEMBERED_S, Remembered


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    now = 0.0
    kept = Remembered[int](lambda: now)
    for number in range(50 * FIRST_LOOK):
        now += REMEMBERED_S / FIRST_LOOK  # so many at a time
        kept.put(str(number), number)
        assert kept.get(str(number)) == number
        assert kept.get(str(number - FIRST_LOOK)) is None
        if number >= FIRST_LOOK:
            assert kept.get(str(number - FIRST_LOOK + 2)) == number - FIRST_LOOK + 2
        assert len(kept._known) <= 2 * FIRST_LOOK


def test_there_are_never_more_than_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST", 1000)
    kept = Remembered[int](lambda: 0.0)
    for number in range(5000):
        kept.put(str(number), number)
        assert len(kept._known) <= 1000
        assert kept.get(str(number)) == number
