"""How GPUs are divided: the arithmetic of docs/production.md, and divisions with an obvious answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from api.cli import weftd
from api.server.workers.gpu_shapes import shape_of
from scheduler.simulator.division import (
    Gpu,
    Owned,
    Shape,
    best,
    candidates,
    cluster_of,
    divisions,
    faster_below_tokens,
    gather_s,
    layouts,
)
from scheduler.simulator.workloads import Workload
from tests.workers.model.planning.test_plan import GIB, SHAPES
from workers.model.card import config_card


def folder_of(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder / name


@pytest.mark.parametrize(
    ("name", "gathered_s", "computing_s"),
    [("30B-A3B", 0.30, (0.05, 0.37, 1.50)), ("235B-A22B", 2.32, (0.33, 2.65, 10.60))],
)
def test_a_pass_takes_what_the_page_says(
    tmp_path: Path, name: str, gathered_s: float, computing_s: tuple[float, ...]
) -> None:
    """docs/production.md, "How large a pass": 8 ranks, passes of 8k, 64k and 256k tokens."""
    shape = shape_of(config_card(name, folder_of(tmp_path, name)), 141 * GIB, slots=64)
    assert gather_s(shape, 8, Gpu()) == pytest.approx(gathered_s, abs=0.005)
    assert gather_s(shape, 1, Gpu()) == 0
    cluster = cluster_of(shape, Gpu(), trainers=1, ranks=8, replicas=1, slots=64)
    for tokens, seconds in zip((8192, 65_536, 262_144), computing_s, strict=True):
        longer = max(seconds, gathered_s)
        assert cluster.pass_takes_s(tokens) - cluster.pass_s == pytest.approx(longer, abs=0.0051)


#: docs/production.md, "How large a pass": tokens of a pass, GB that one of 8 ranks receives, and seconds of the pass.
OWNED = {
    "30B-A3B": ((2048, 3, 0.02), (8192, 10, 0.07), (65_536, 70, 0.57), (262_144, 275, 2.28)),
    "235B-A22B": ((2048, 13, 0.12), (8192, 38, 0.44), (65_536, 271, 3.43), (262_144, 1071, 13.66)),
}


@pytest.mark.parametrize(("name", "below_tokens"), [("30B-A3B", 34_000), ("235B-A22B", 44_000)])
def test_owners_of_experts_take_what_the_page_says(tmp_path: Path, name: str, below_tokens: int) -> None:
    """Eight runs, with equal work for all owners."""
    shape, gpu = shape_of(config_card(name, folder_of(tmp_path, name)), 141 * GIB, slots=64), Gpu()
    owners = cluster_of(shape, gpu, trainers=1, ranks=8, replicas=1, slots=64, owned=shape.owned)
    gathering = cluster_of(shape, gpu, trainers=1, ranks=8, replicas=1, slots=64)
    for tokens, received_gb, seconds in OWNED[name]:
        received_s = tokens * owners.travel_s + 8 * owners.adapter_s
        assert received_s * gpu.received_bytes_per_s == pytest.approx(received_gb * 1e9, abs=0.5e9)
        pass_s = owners.pass_takes_s(tokens, runs=8) - owners.pass_s
        assert pass_s == pytest.approx(seconds, abs=0.0051)
        faster = pass_s < gathering.pass_takes_s(tokens) - gathering.pass_s
        assert faster == (tokens < below_tokens)
    assert shape.owned is not None
    assert 8 * owners.adapter_s * gpu.received_bytes_per_s == pytest.approx(
        {"30B-A3B": 1.2e9, "235B-A22B": 4.7e9}[name], abs=5e7
    )
    assert faster_below_tokens(shape, gpu, 8, runs=8) == pytest.approx(below_tokens, abs=500)


def test_all_wait_for_the_busiest_owner() -> None:
    """Experts are half of a token's work, and sending its part takes 3 ms; 10 ms for the factors of a run."""
    owned = Owned(
        experts=8,
        ranks=2,
        active=SMALL.active_parameters // 2,
        token_bytes=12 * 350 * 10**6,
        adapter_bytes=40 * 350 * 10**6,
    )
    counts = {"trainers": 1, "ranks": 2, "replicas": 1, "slots": 8}
    plain, even, skewed = (
        cluster_of(SMALL, Gpu(), **counts, owned=who, busiest=busiest)
        for who, busiest in ((None, 1.0), (owned, 1.0), (owned, 2.0))
    )
    computed_s = plain.pass_takes_s(1000) - plain.pass_s
    for cluster, longer, travels in ((even, 1.0, 1), (skewed, 1.5, 2)):
        seconds = longer * computed_s + travels * 1000 * 0.003 + 2 * 0.010
        assert cluster.pass_takes_s(1000, runs=2) == pytest.approx(cluster.pass_s + seconds)
        assert cluster.gather_s == 0


def test_experts_are_owned_only_in_equal_shares_that_fit() -> None:
    owned = Owned(experts=12, ranks=4, active=1, token_bytes=1, adapter_bytes=1)
    mixture = replace(SMALL, owned=owned)
    assert [list(layouts(mixture, ranks)) for ranks in (1, 2, 4, 8)] == [[""], ["all"], ["all", "experts"], ["all"]]
    assert list(layouts(SMALL, 4)) == ["all"]


def test_attention_takes_what_its_shape_says(tmp_path: Path) -> None:
    """Counted layer by layer, for a causal sequence of 8,192 tokens: scores and values of half the pairs, forward,
    again, and five such products instead of two in the backward."""
    shape = shape_of(config_card("30B-A3B", folder_of(tmp_path, "30B-A3B")), 141 * GIB, slots=64)
    length, heads, head, layers = 8192, 32, 128, 48
    product = 2 * heads * head * length**2 / 2
    assert shape.pair_operations * length**2 == pytest.approx(layers * (2 + 2 + 5) * product)
    cluster = cluster_of(shape, Gpu(), trainers=1, ranks=8, replicas=1, slots=64)
    alone = cluster.pass_takes_s(65_536, pairs=8 * length**2) - cluster.pass_takes_s(65_536)
    assert alone == pytest.approx(8 * layers * 9 * product / 400e12 / 8)


def test_what_a_model_needs_at_least(tmp_path: Path) -> None:
    cards = {name: config_card(name, folder_of(tmp_path, name)) for name in SHAPES}
    needs = {name: shape_of(card, 141 * GIB, slots=64) for name, card in cards.items()}
    assert [(needs[name].ranks, needs[name].gpus) for name in ("4B", "30B-A3B", "235B-A22B")] == [
        (1, 1),
        (1, 1),
        (8, 4),
    ]
    assert needs["30B-A3B"].active_parameters == pytest.approx(3.0e9, rel=0.1)


#: A model that fits one GPU, with two seconds of training for each second of sampling.
SMALL = Shape(10**9, 2 * 10**9, 10**9, 1000, ranks=1, gpus=1)


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
    assert {line.split()[3] for line in shown.output.splitlines() if "2 x" in line} >= {"all", "experts"}
    assert 'shard = "experts" is faster below' in shown.output.splitlines()[-1]
    refused = CliRunner().invoke(weftd, [*asked, "--gpu-gib", "20"])
    assert refused.exit_code == 2
    assert "one trainer takes 8 GPUs of 20 GiB, and one generator" in refused.output
