"""A trainer of several ranks gives every run the bits that one process gives it, however a step fails on one rank; and
no rank has more of the base than its part."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Forked
from tests.search import TIMES, chance
from tests.workers.model.models import reference
from tests.workers.trainer.ranks.meeting import meeting, place

ROOT = Path(__file__).parents[4]


PART, OWNED, MAPPED = "all", "experts", "mapped"


@pytest.mark.parametrize(
    ("ranks", "layout", "family", "steps", "scenarios"),
    [
        (2, PART, "moe", 3, ["plain", "recomputed", "short of memory", "paged"]),
        (4, PART, "moe", 2, ["plain"]),
        (2, PART, "qwen3.5-moe", 2, ["plain"]),
        (2, PART, "deepseek", 2, ["plain"]),
        (2, MAPPED, "moe", 3, ["plain", "paged"]),
        (2, OWNED, "moe", 3, ["plain", "recomputed", "short of memory", "paged", "owner short"]),
        (4, OWNED, "moe", 2, ["plain", "owner short, back"]),
        (2, OWNED, "gpt-oss", 2, ["recomputed", "owner fails"]),
    ],
    ids=[
        "two ranks",
        "two nodes of two ranks",
        "two ranks, a hybrid",
        "two ranks, latent attention",
        "two ranks, one mapping",
        "two owners",
        "four owners",
        "two owners, biases",
    ],
)
def test_as_one_process(tmp_path: Path, ranks: int, layout: str, family: str, steps: int, scenarios: list[str]) -> None:
    reference(family).save_pretrained(tmp_path / "model")
    found = together(ranks, [str(tmp_path / "model"), str(tmp_path), layout, str(steps), "usual", *scenarios])
    assert [world["scenario"] for world in found] == scenarios
    for world in found:
        assert len(world["same"]) > 12 * steps
        assert all(world["same"]), world
        assert set(world["homes"]) == set(range(ranks))
        assert world["moves"] >= steps, "the large operation was computed at home alone"
        assert set(world["guests"]) == {"forward without a gradient", "forward_backward with a gradient"}
        share = world["experts"] / ranks + world["total"] - world["experts"] if layout == OWNED else world["total"] / 2
        for size in (*world["held"], *world["read"]):
            assert size <= (1.0 if layout == OWNED else 1.1) * share
        assert world["scenario"] != "paged" or world["pages"] > 0
        assert bool(world["failures"]) is world["scenario"].startswith("owner")


@pytest.mark.parametrize(
    ("ranks", "layout", "steps", "scenarios"),
    [
        (2, PART, 2, ["poor 0"]),
        (2, MAPPED, 2, ["poor 1", "full 0 2", "full 1 2", "short steps 0 7", "short steps 1 2"]),
        (2, OWNED, 2, ["poor 0"]),
        (4, MAPPED, 2, ["poor 2", "full 1 3"]),
    ],
)
def test_as_one_process_however_short_of_memory_a_rank_is(
    tmp_path: Path, ranks: int, layout: str, steps: int, scenarios: list[str]
) -> None:
    """It is short of memory for what it computes for others, for its own work beside that, or for its runs' states."""
    reference("moe").save_pretrained(tmp_path / "model")
    found = together(ranks, [str(tmp_path / "model"), str(tmp_path), layout, str(steps), "usual", *scenarios])
    assert [world["scenario"] for world in found] == scenarios
    for world in found:
        assert all(world["same"]), world
        assert world["failures"]
        assert (world["aside"] > 0) is world["scenario"].startswith(("full", "short steps 0 7"))


@pytest.mark.search
@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, OWNED), (2, PART), (4, MAPPED), (4, OWNED)] if TIMES else [(2, OWNED)]
)
def test_as_one_process_whatever_each_rank_is_short_of(tmp_path: Path, ranks: int, layout: str) -> None:
    reference("moe").save_pretrained(tmp_path / "model")
    rng = chance(ranks)
    scenarios = [f"drawn {rng.randrange(10**6)}" for _ in range(2 * max(1, TIMES))]
    found = together(ranks, [str(tmp_path / "model"), str(tmp_path), layout, "2", "usual", *scenarios])
    print(*(f"{world['scenario']}: {world['failures']}, {world['aside']} aside" for world in found), sep="\n")
    for world in found:
        assert all(world["same"]), world


@pytest.mark.parametrize(
    ("ranks", "family", "chosen", "tenants"),
    [(2, "gpt-oss", 2, "usual"), (4, "gpt-oss", 1, "few"), (4, "moe", 2, "wide")],
    ids=["each layer with one owner", "one expert for all, and ranks without runs", "adapters of all ranks"],
)
def test_as_one_process_however_uneven(tmp_path: Path, ranks: int, family: str, chosen: int, tenants: str) -> None:
    model = reference(family, num_experts_per_tok=chosen)
    for layer, each in enumerate(model.model.layers if family == "gpt-oss" else ()):
        first = layer * chosen % 4
        each.mlp.router.bias[first : first + chosen] = 100.0
    model.save_pretrained(tmp_path / "model")
    (world,) = together(ranks, [str(tmp_path / "model"), str(tmp_path), OWNED, "2", tenants, "plain"])
    assert len(world["same"]) > 4
    assert all(world["same"]), world
    assert len(set(world["homes"])) == (2 if tenants == "few" else ranks)


def test_a_rank_that_dies_while_pairs_travel_ends_all_and_fails_no_operation(tmp_path: Path) -> None:
    reference("moe").save_pretrained(tmp_path / "model")
    with started(4, [str(tmp_path / "model"), str(tmp_path), OWNED, "2", "usual", "killed"]) as processes:
        out = ended(processes)
    codes = [process.returncode for process in processes]
    assert codes[1] == -signal.SIGKILL
    assert 0 not in codes
    assert out[0] == [], "an operation was answered as failed, or all was done"


@pytest.mark.parametrize("word", ["pass", "begin", "drain", "stop"])
def test_a_rank_that_does_not_hear_its_word_ends_the_leader_when_its_time_is_over(tmp_path: Path, word: str) -> None:
    with started(2, [str(tmp_path), word], "stopped") as processes:
        processes[0].communicate(timeout=60)
        assert processes[0].returncode == -signal.SIGALRM
        processes[1].kill()
        ended(processes)


def together(ranks: int, args: list[str], **variables: str) -> list[Any]:
    """Run the worlds on so many ranks, with these environment variables, and return what rank 0 has found."""
    with started(ranks, args, **variables) as processes:
        out = ended(processes)
    assert [process.returncode for process in processes] == [0] * ranks
    return out[0]


@contextmanager
def started(ranks: int, args: list[str], program: str = "worlds", **variables: str) -> Iterator[list[Forked]]:
    store = meeting()
    processes = [
        Forked(
            "-m",
            f"tests.workers.trainer.ranks.{program}",
            *args,
            env=os.environ | place(rank, ranks, store.port) | {"OMP_NUM_THREADS": "1"} | variables,
        )
        for rank in range(ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def ended(processes: list[Forked]) -> list[list[Any]]:
    """Wait for the ranks to end; the JSON that each has printed."""
    said = [process.communicate(timeout=300) for process in processes]
    print(*(complaints for _, complaints in said), file=sys.stderr)
    return [[json.loads(line) for line in lines.splitlines() if line.startswith("{")] for lines, _ in said]
