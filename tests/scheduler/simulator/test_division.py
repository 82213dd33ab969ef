"""How GPUs are divided: the arithmetic of docs/production.md, and divisions whose answer is plain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from api.cli import weftd
from api.server.gpu_shapes import shape_of
from scheduler.simulator.division import Gpu, Shape, best, candidates, cluster_of, divisions, gather_s
from scheduler.simulator.workloads import Workload
from tests.workers.model.planning.test_plan import GIB, SHAPES
from workers.model.card import config_card


def folder_of(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder / name


@pytest.mark.parametrize(
    ("name", "gathered_s", "computing_s"),
    [("30B-A3B", 0.30, (0.05, 0.41, 1.65)), ("235B-A22B", 2.34, (0.34, 2.73, 10.91))],
)
def test_a_pass_takes_what_the_page_says(
    tmp_path: Path, name: str, gathered_s: float, computing_s: tuple[float, ...]
) -> None:
    """docs/production.md, "How large a pass": 8 ranks, passes of 8k, 64k and 256k tokens. The page counts
    the embedding among what is computed, which is looked up."""
    shape = shape_of(config_card(name, folder_of(tmp_path, name)), 141 * GIB, slots=64)
    assert gather_s(shape, 8, Gpu()) == pytest.approx(gathered_s, rel=0.02)
    assert gather_s(shape, 1, Gpu()) == 0
    cluster = cluster_of(shape, Gpu(), trainers=1, ranks=8, replicas=1, slots=64)
    for tokens, seconds in zip((8192, 65_536, 262_144), computing_s, strict=True):
        longer = max(seconds, gathered_s)
        assert cluster.pass_takes_s(tokens) - cluster.pass_s == pytest.approx(longer, rel=0.12)


def test_what_a_model_needs_at_least(tmp_path: Path) -> None:
    cards = {name: config_card(name, folder_of(tmp_path, name)) for name in SHAPES}
    needs = {name: shape_of(card, 141 * GIB, slots=64) for name, card in cards.items()}
    assert [(needs[name].ranks, needs[name].gpus) for name in ("4B", "30B-A3B", "235B-A22B")] == [
        (1, 1),
        (1, 1),
        (8, 4),
    ]
    assert needs["30B-A3B"].active_parameters == pytest.approx(3.0e9, rel=0.1)


#: Of a model that fits one GPU, with two seconds of training for each second of sampling.
SMALL = Shape(10**9, 0, 10**9, 1000, ranks=1, gpus=1)


def test_candidates_use_all_gpus_and_no_trainer_is_without_a_run() -> None:
    assert set(candidates(SMALL, 4, tenants=8)) == {(1, 1, 3), (2, 1, 2), (3, 1, 1), (1, 2, 2)}
    assert {trainers for trainers, _, _ in candidates(SMALL, 64, tenants=2)} <= {1, 2}
    assert len(candidates(SMALL, 512, tenants=64)) <= 16


def test_who_only_samples_gets_generators_and_who_only_trains_trainers() -> None:
    trains = Workload("trains", groups=8, overlap=2, samples=False)
    mostly = Workload("samples", groups=16, overlap=1, mean_tokens=4000, prompt=10)
    busy = [list(divisions(SMALL, Gpu(), 4, [load] * 6, slots=8, hours=0.05)) for load in (trains, mostly)]
    trainers, generators = (best(found).cluster for found in busy)
    assert (trainers.trainers * trainers.ranks, trainers.replicas) == (3, 1)
    assert generators.replicas > generators.trainers * generators.ranks


def test_the_command_says_which_is_best(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "30B-A3B")
    asked = ["simulate", "--model", str(folder), "--gpus", "4", "--tenants", "3", "--hours", "0.3"]
    shown = CliRunner().invoke(weftd, asked)
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[0].split()[:3] == ["trainers", "x", "ranks"]
    assert sum(line.endswith("best") for line in shown.output.splitlines()) == 1
    refused = CliRunner().invoke(weftd, [*asked, "--gpu-gib", "20"])
    assert refused.exit_code == 2
    assert "one trainer takes 8 GPUs of 20 GiB, and one generator" in refused.output
