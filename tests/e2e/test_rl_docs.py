"""Every block of docs/rl.md runs, in order and in one program, with fewer and smaller steps; the examples run, and
learn if they are given the time (`long`)."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft import rl
from weft.rl import checks
from weft.rl.loops import train as loop
from weft.rl.sandboxes import local

from tests.e2e.conftest import Weftd
from tests.forked import run_forked
from tests.isolation import isolated, possible
from tests.pages import ROOT, runnable

pytestmark = pytest.mark.server


def blocks() -> list[str]:
    return [block for block in runnable("docs/rl.md", "python") if "sandboxes" not in block or possible()]


def test_the_page_runs(weftd: Weftd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = blocks()
    assert len(found) >= 7
    monkeypatch.setenv("WEFT_BASE_URL", weftd.url)
    monkeypatch.setenv("WEFT_API_KEY", weftd.key("reader"))
    monkeypatch.setattr(local, "_free_bytes", lambda: 1 << 40)  # whatever other tests leave
    whole, reports = checks.recipe, []

    def short(kind: type[Any], given: Mapping[str, Any]) -> Any:
        groups = given.get("groups", rl.Groups())
        groups = replace(groups, batch=min(groups.batch, 2))
        return whole(kind, {**given, "groups": groups, "steps": min(given.get("steps", 100), 2)})

    def kept(*args: Any, **options: Any) -> rl.Report:
        reports.append(loop.train(*args, **options))
        return reports[-1]

    monkeypatch.setattr(checks, "recipe", short)
    monkeypatch.setattr(rl, "train", kept)
    names: dict[str, Any] = {"__name__": "docs"}
    for block in found:
        exec(compile(block.replace("/tmp/", f"{tmp_path}/"), "docs/rl.md", "exec"), names)
    names["service"].close().result(60)
    assert len(reports) == 6 + possible()
    assert all(report.steps for report in reports)
    assert max(reports[-2].curve("lag/max")) <= 1
    assert len((tmp_path / "sums-1.jsonl").read_text().splitlines()) >= 2


def test_the_example_runs_and_draws(weftd: Weftd, tmp_path: Path) -> None:
    picture = tmp_path / "agent.png"
    assert len(rewards_of_guesses(weftd, 1, "--plot", str(picture))) == 1
    assert size_of(picture) == (880, 352)


@pytest.mark.long
def test_the_example_learns(weftd: Weftd) -> None:
    rewards = rewards_of_guesses(weftd, 20)
    assert sum(rewards[-4:]) > 1.6 * sum(rewards[:4]), rewards


def rewards_of_guesses(weftd: Weftd, steps: int, *options: str) -> list[float]:
    said = example(weftd, "rl_agent.py", "--steps", str(steps), *options)
    rewards: list[float] = json.loads(said[-1].removeprefix("reward "))
    return rewards


def test_a_sweep_ends_in_a_picture(weftd: Weftd, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Capital of Peru?"}, {"role": "assistant", "content": "Lima"}]
    data = tmp_path / "my.jsonl"
    data.write_text(f"{json.dumps({'messages': talk})}\n" * 20)
    picture = tmp_path / "sweep.png"
    (said,) = example(weftd, "sweep.py", "--epochs", "8", "--data", str(data), "--plot", str(picture))
    losses = eval(said.removesuffix(f" {picture}"))
    assert losses[3e-3] < losses[1e-3] < losses[3e-4]
    assert size_of(picture) == (770, 396)


def size_of(picture: Path) -> tuple[int, ...]:
    """Width and height of a PNG in pixels (PNG, 11.2.1)."""
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:])


def test_an_agent_that_knows_only_openai_is_trained(weftd: Weftd) -> None:
    said = example(weftd, "openai_agent.py", "--steps", "2", "--batch", "2")
    assert [line.split()[:2] for line in said] == [["reward", "0"], ["reward", "1"]]


@pytest.mark.long
def test_the_reward_more_than_doubles(weftd: Weftd) -> None:
    """Everything is seeded: on one machine the rewards are always the same."""
    said = example(weftd, "openai_agent.py", "--steps", "8", "--batch", "8")
    rewards = [float(line.split()[-1]) for line in said]
    assert sum(rewards[-3:]) / 3 > 2 * rewards[0], rewards


@pytest.mark.long
@pytest.mark.timeout(1200)
@isolated
def test_an_agent_with_a_tool_in_a_sandbox_learns(weftd: Weftd) -> None:
    for _ in range(3):  # nothing is seeded here, and a single step may get worse
        said = example(weftd, "tool_agent.py", "--steps", "12", "--batch", "8")
        rewards = [float(line.split()[-1]) for line in said]
        assert len(rewards) == 12
        if max(rewards[-3:]) >= 2 * rewards[0]:
            return
    pytest.fail(f"the reward did not double: {rewards}")


def example(weftd: Weftd, name: str, *options: str) -> list[str]:
    environment = os.environ | {"WEFT_BASE_URL": weftd.url, "WEFT_API_KEY": weftd.key("example")}
    file = ROOT / "examples" / name
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(file.parent)!r}); runpy.run_path({str(file)!r}, None, '__main__')"
    )
    done = run_forked("-c", program, *options, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
