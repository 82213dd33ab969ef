"""Which checkpoint a loop goes on from."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from weft import rl
from weft.errors import WeftError
from weft.rest_client import RestClient
from weft.rl.loops.checkpoint import packed
from weft.training_client import TrainingClient
from weft.wire.rest import Checkpoint, CheckpointsListResponse
from weft.wire.sessions import SessionSearchRequest

NOW = datetime(2026, 11, 27, tzinfo=UTC)


def saved(name: str, step: int, age_s: int, *runs: str, **more: Any) -> Checkpoint:
    state = packed({"step": step, "runs": runs, **more})
    facts = {"weft.rl": name, "weft.rl.step": str(step), "weft.rl.state": state}
    return Checkpoint(
        checkpoint_id=f"weights/{name}-{step}",
        checkpoint_type="training",
        time=NOW - timedelta(seconds=age_s),
        tinker_path=f"tinker://r:train:0/weights/{name}-{step}",
        user_metadata=facts,
    )


class Listing:
    """An organisation's checkpoints, newest first; `change` is called between two pages of the list."""

    def __init__(self, rows: list[Checkpoint], change: Any) -> None:
        self.rows, self._change = rows, change

    async def list_user_checkpoints(self, limit: int, offset: int) -> CheckpointsListResponse:
        page = self.rows[offset : offset + limit]
        self._change(self.rows)
        self._change = lambda rows: None
        return CheckpointsListResponse(checkpoints=page)

    async def get_training_run_by_tinker_path(self, path: str, scope: str) -> Any:
        return SimpleNamespace(last_request_time=next(row.time for row in self.rows if row.tinker_path == path))

    async def search_sessions(self, request: SessionSearchRequest) -> Any:
        ages_s = {"late": [1]}.get(str(request.session_id), [1000])
        return SimpleNamespace(sessions=[SimpleNamespace(created_at=NOW - timedelta(seconds=age)) for age in ages_s])


def newest(rows: list[Checkpoint], change: Any) -> int:
    found = asyncio.run(rl.Checkpoints("mine").newest(cast(RestClient, Listing(rows, change))))
    assert found is not None
    assert found[0].endswith(f"mine-{found[1]['step']}")
    return int(found[1]["step"])


@pytest.mark.parametrize("gone", [1, 7, 100])
def test_none_is_passed_over_while_newer_ones_expire(gone: int) -> None:
    """Later pages of the list move up meanwhile: the loop began anew, or from a step long ago."""
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


def test_it_is_the_one_with_the_most_steps_and_of_several_the_last() -> None:
    rows = [saved("mine", 1, 1), saved("mine", 3, 2, told="later"), saved("mine", 3, 3, told="before")]
    found = asyncio.run(rl.Checkpoints("mine").newest(cast(RestClient, Listing(rows, lambda rows: None))))
    assert found is not None
    assert (found[1]["step"], found[1]["told"]) == (3, "later")
    assert newest(rows[:1], lambda rows: None) == 1


def test_what_a_loop_beside_it_has_spent_is_counted() -> None:
    """A second loop under the name has begun where the first was, and was refused: its run is named only in its first
    checkpoint, which is older than the one to go on from."""
    rows = [
        saved("mine", 10, 1, "first"),
        saved("another", 90, 2, "nobody's"),
        saved("mine", 5, 3, "first", "second"),
        saved("mine", 5, 4, "first"),
    ]
    found = asyncio.run(rl.Checkpoints("mine").newest(cast(RestClient, Listing(rows, lambda rows: None))))
    assert found is not None
    assert (found[1]["step"], sorted(found[1]["runs"])) == (10, ["first", "second"])


class Run:
    """A run whose checkpoints are in a list."""

    def __init__(self, name: str, rows: list[Checkpoint]) -> None:
        self.name, self.rows = name, rows

    def create_rest_client(self) -> Listing:
        return Listing(self.rows, lambda rows: None)

    async def get_info_async(self) -> Any:
        return SimpleNamespace(model_id=self.name)

    async def save_state(self, name: str, *_: Any, user_metadata: dict[str, str], **__: Any) -> Any:
        age_s = -len(self.rows)
        self.rows.insert(0, saved("mine", 0, age_s).model_copy(update={"user_metadata": user_metadata}))
        return SimpleNamespace(path=name)


def test_what_a_loop_that_was_refused_has_paid_elsewhere_is_counted_once() -> None:
    """No run's usage tells of a teacher or a reference that has scored. And the first loop has gone on from what
    earlier lives had told as a sum."""
    rows = [saved("mine", 2, 1, "old", elsewhere_nusd=100)]
    mine, first, second = rl.Checkpoints("mine"), Run("first", rows), Run("second", rows)

    def save(run: Run, step: int, began: str, paid: int) -> None:
        state = {"step": step, "runs": ["old", run.name], "elsewhere": {"": 100, run.name: paid}}
        asyncio.run(mine.save(cast(TrainingClient, run), step, state, began))

    def known() -> tuple[int, dict[str, int]]:
        found = asyncio.run(mine.newest(cast(RestClient, Listing(rows, lambda rows: None))))
        assert found is not None
        return found[1]["step"], found[1]["elsewhere"]

    began = rows[0].tinker_path
    assert known() == (2, {"": 100})
    save(second, 3, began, 5)
    save(first, 6, began, 20)
    with pytest.raises(WeftError, match="another loop saves under 'mine'"):
        save(second, 5, began, 7)
    assert known() == (6, {"": 100, "first": 20, "second": 7})
    with pytest.raises(WeftError, match="another loop saves under 'mine'"):
        save(Run("third", rows), 5, began, 0)
    assert len(rows) == 4  # it has paid nothing beyond its usage
    save(first, 8, rows[1].tinker_path, 30)
    assert known() == (8, {"": 100, "first": 30, "second": 7})


def save(run: Run, step: int, began: str | None = None, **more: Any) -> dict[str, Any]:
    """The contents of the checkpoint."""
    state = {"step": step, "runs": [run.name], **more}
    asyncio.run(rl.Checkpoints("mine").save(cast(TrainingClient, run), step, state, began))
    found = asyncio.run(rl.Checkpoints("mine").newest(cast(RestClient, Listing(run.rows[:1], lambda rows: None))))
    assert found is not None
    return found[1]


def test_a_checkpoint_tells_of_those_that_expire() -> None:
    rows = [saved("mine", 2, 1, "first")]
    assert save(Run("second", rows), 3)["runs"] == ["second", "first"]
    with pytest.raises(WeftError, match="mine-0 is of step 3, this loop came to step 3"):
        save(Run("third", rows), 3)


@pytest.mark.parametrize(("age_s", "refused"), [(2, False), (1, True), (0, True)])
def test_a_save_that_a_killed_loop_has_left_at_the_server_stops_no_later_life(age_s: int, refused: bool) -> None:
    """This life began when that save still waited, and so without it; whoever has asked for anything since is alive."""
    rows = [saved("mine", 4, age_s, "killed")]
    run = Run("late:train:0", rows)
    if refused:
        with pytest.raises(WeftError, match="mine-4 is of step 4, this loop came to step 3"):
            save(run, 3)
        return
    assert save(run, 3)["runs"] == ["late:train:0", "killed"]
    assert newest([*rows], lambda rows: None) == 4
    assert save(run, 4)["step"] == 4


def test_of_more_than_a_checkpoint_keeps_the_largest_sources_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(0)
    little, more, most = ([chance.random() for _ in range(count)] for count in (10, 900, 1000))
    sources = {"little": little, "more": more, "most": most}
    rollouts = save(Run("first", []), 1, rollouts={"epoch": 4, "sources": sources})["rollouts"]
    assert rollouts == {"epoch": 4, "sources": {"little": little, "more": more}}
    assert "a checkpoint keeps 16000: the source 'most' begins anew" in caplog.text
    with pytest.raises(WeftError, match="bytes, a checkpoint keeps 16000"):
        save(Run("first", []), 1, advantage=[*more, *most], rollouts={"sources": {"little": little}})
