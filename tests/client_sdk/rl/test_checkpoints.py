"""Which checkpoint a loop goes on from."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from weft import rl
from weft.rest_client import RestClient
from weft.rl.loops.checkpoint import packed
from weft.wire.rest import Checkpoint, CheckpointsListResponse

NOW = datetime(2026, 11, 27, tzinfo=UTC)


def saved(name: str, step: int, age_s: int, *runs: str) -> Checkpoint:
    state = packed({"step": step, "runs": runs})
    facts = {"weft.rl": name, "weft.rl.step": str(step), "weft.rl.state": state}
    return Checkpoint(
        checkpoint_id=f"weights/{name}-{step}",
        checkpoint_type="training",
        time=NOW - timedelta(seconds=age_s),
        tinker_path=f"tinker://r:train:0/weights/{name}-{step}",
        user_metadata=facts,
    )


class Listing:
    """An organisation's checkpoints, newest first; `change` is what happens to them between two pages."""

    def __init__(self, rows: list[Checkpoint], change: Any) -> None:
        self.rows, self._change = rows, change

    async def list_user_checkpoints(self, limit: int, offset: int) -> CheckpointsListResponse:
        page = self.rows[offset : offset + limit]
        self._change(self.rows)
        self._change = lambda rows: None
        return CheckpointsListResponse(checkpoints=page)


def newest(rows: list[Checkpoint], change: Any) -> int:
    found = asyncio.run(rl.Checkpoints("mine").newest(cast(RestClient, Listing(rows, change))))
    assert found is not None
    assert found[0].endswith(f"mine-{found[1]['step']}")
    return int(found[1]["step"])


@pytest.mark.parametrize("gone", [1, 7, 100])
def test_none_is_passed_over_while_newer_ones_expire(gone: int) -> None:
    """The lists of a page behind them move up: the loop began anew, or from a step long ago."""
    rows = [*(saved("another", step, 200 - step) for step in range(100, 0, -1)), saved("mine", 40, 300)]
    rows += [saved("mine", 20, 400), *(saved("another", -step, 500) for step in range(150))]
    assert newest(rows, lambda rows: rows.__delitem__(slice(gone))) == 40


def test_saves_and_an_end_between_two_pages_change_nothing() -> None:
    def change(rows: list[Checkpoint]) -> None:
        del rows[3:6]
        rows[:0] = [saved("another", 1000 + number, 0) for number in range(3)]

    rows = [*(saved("another", step, 200 - step) for step in range(100, 0, -1)), saved("mine", 40, 300)]
    assert newest(rows, change) == 40


@pytest.mark.parametrize("others", [0, 98, 99, 100, 101, 198, 199, 250])
def test_all_pages_are_read(others: int) -> None:
    rows = [*(saved("another", step, 1) for step in range(others)), saved("mine", 7, 9)]
    assert newest(rows, lambda rows: None) == 7


def test_what_a_loop_beside_it_has_spent_is_counted() -> None:
    """A second loop under the name has begun where the first was, and was refused: its run is in its first checkpoint
    alone, which is older than that which is gone on with."""
    rows = [
        saved("mine", 10, 1, "first"),
        saved("another", 90, 2, "nobody's"),
        saved("mine", 5, 3, "first", "second"),
        saved("mine", 5, 4, "first"),
    ]
    found = asyncio.run(rl.Checkpoints("mine").newest(cast(RestClient, Listing(rows, lambda rows: None))))
    assert found is not None
    assert (found[1]["step"], sorted(found[1]["runs"])) == (10, ["first", "second"])
