"""The number of cores a container may use, read from folders laid out as its kernel would show them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from store import cgroups
from store.cgroups import cores
from store.settings import Settings


@pytest.fixture(autouse=True)
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container on a machine of 64 cores, in a cgroup within another."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    monkeypatch.setattr(cgroups, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("0::/pod/server\n")


def say(file: Path, what: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{what}\n")


@pytest.mark.parametrize(
    ("own", "above", "found"),
    [
        ("max 100000", "max 100000", 64),
        ("200000 100000", "max 100000", 2),
        ("max 100000", "400000 100000", 4),
        ("250000 100000", "400000 100000", 3),
        ("10000 100000", "max 100000", 1),
        ("9900000 100000", "max 100000", 64),
    ],
)
def test_a_quota_is_a_limit(tmp_path: Path, own: str, above: str, found: int) -> None:
    say(tmp_path / "pod" / "server" / "cpu.max", own)
    say(tmp_path / "pod" / "cpu.max", above)
    assert cores() == found


@pytest.mark.parametrize(("quota", "found"), [(-1, 64), (800_000, 8)])
def test_a_quota_of_version_1(tmp_path: Path, quota: int, found: int) -> None:
    (tmp_path / "own").write_text("4:cpu,cpuacct:/pod\n0::/\n")
    say(tmp_path / "cpu" / "pod" / "cpu.cfs_quota_us", str(quota))
    say(tmp_path / "cpu" / "pod" / "cpu.cfs_period_us", "100000")
    assert cores() == found


def test_workers_of_a_small_container_on_a_large_machine_have_few_threads(tmp_path: Path) -> None:
    """Else each would have threads for half of the machine's cores, and all would share the few of the container."""
    say(tmp_path / "pod" / "server" / "cpu.max", "400000 100000")
    settings = Settings(data_dir=tmp_path)
    assert (settings.trainer.threads, settings.generator.threads) == (2, 2)
