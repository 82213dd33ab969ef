from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest
from weft import rl
from weft.rl.loops.report import plain
from weft.rl.loops.sinks import Sink, close, tell


def test_a_line_is_json_whatever_a_number_is(tmp_path: Path) -> None:
    """JSON has no NaN and no infinity, and readers other than Python's refuse them."""
    sink = rl.JsonLines(tmp_path / "steps.jsonl")
    sink.log(0, 1, {"reward": 0.5, "ratio": math.inf, "judged": math.nan})
    [line] = (tmp_path / "steps.jsonl").read_bytes().splitlines()  # while the loop goes on
    sink.close()
    assert orjson.loads(line) == {"step": 0, "reward": 0.5, "ratio": None, "judged": None}


def test_a_line_that_was_cut_costs_no_other(tmp_path: Path) -> None:
    """A full disk cuts a line; the life that wrote it is killed, and the next life appends to the file."""
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step": 0, "reward": 0.5}\n{"step": 1, "rew')
    for step in (1, 2):
        sink = rl.JsonLines(path)
        sink.log(step, 3, {"reward": 0.5})
        sink.close()
    first, cut, *rest = path.read_bytes().splitlines()
    assert cut == b'{"step": 1, "rew'
    assert [orjson.loads(line)["step"] for line in (first, *rest)] == [0, 1, 2]


def test_a_sink_is_good_for_the_next_loop_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops close their sinks when they end, but a list of sinks is often given to several loops."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = rl.Progress()
    sinks: list[Sink] = [rl.JsonLines(tmp_path / "steps.jsonl"), bar]
    for loop in range(2):
        tell(sinks, loop, 4, {"reward": 0.5})
        shown = bar._bar
        assert (shown.live.is_started, shown.tasks[0].completed, shown.tasks[0].total) == (True, loop + 1, 4)
        close(sinks)
        assert not shown.live.is_started
        close(sinks)
    lines = (tmp_path / "steps.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["step"] for line in lines] == [0, 1]


def test_without_a_terminal_there_is_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    rl.Progress().log(1, 4, {"reward": 0.51239, "tokens": 7.0, "loss": 12.0})
    assert capsys.readouterr() == ("", "step 2/4  reward 0.5124  loss 12\n")


def test_an_evaluation_that_ends_steps_later_is_told_and_takes_the_bar_back_nowhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = rl.Progress()
    bar.log(1, 4, {"eval/reward": 0.75})
    assert capsys.readouterr().err == "step 2/4  eval/reward 0.75\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for step, told in ((2, {"reward": 0.5, "tokens": 7.0}), (1, {"eval/reward": 0.75})):
        bar.log(step, 4, told)
    [task] = bar._bar.tasks
    bar.close()
    assert (task.completed, task.fields["text"]) == (3, "reward 0.5  eval/reward 0.75")


class Failing:
    """A sink of another package that fails: trackio's database on a full disk, a tracker whose server is away."""

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    def close(self) -> None:
        raise RuntimeError("the tracker is away")


def test_a_sink_that_fails_ends_no_run_and_takes_no_other_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else hours of training would end over curves that the server has too; and at the end without the last save."""
    sinks: list[Sink] = [Failing(), rl.JsonLines(tmp_path / "steps.jsonl")]
    tell(sinks, 0, 1, {"reward": 0.5})
    close(sinks)
    assert len((tmp_path / "steps.jsonl").read_bytes().splitlines()) == 1
    assert [each.getMessage() for each in caplog.records] == [
        "the sink Failing failed at step 0: OperationalError: database or disk is full",
        "the sink Failing failed at its end: RuntimeError: the tracker is away",
    ]


def test_numbers_that_differ_in_their_reduction_alone_are_both_told() -> None:
    told = {
        "e_max_violation:mean": 0.5,
        "e_max_violation:max": 2.0,
        "loss:sum": 1.0,
        "custom/kl:mean": 0.1,
        "step:max": 3,
    }
    assert plain(told) == {"e_max_violation": 0.5, "e_max_violation/max": 2.0, "loss": 1.0, "kl": 0.1}
