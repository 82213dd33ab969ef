"""The machine's memory as the plan reads it, from folders with the files that a container's kernel would show."""

from __future__ import annotations

from pathlib import Path

import pytest

from store import cgroups
from workers.model.planning import machine
from workers.model.planning.machine import free_bytes

GIB = 1 << 30


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The topmost cgroup that a container sees."""
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_available_bytes", lambda: 100 * GIB)
    be_in(tmp_path, monkeypatch, "0::/")
    return tmp_path


def be_in(folder: Path, monkeypatch: pytest.MonkeyPatch, *groups: str) -> None:
    """Have the kernel say that this process is in these cgroups."""
    (folder / "own").write_text("".join(f"{group}\n" for group in groups))
    monkeypatch.setattr(cgroups, "OWN_CGROUP", folder / "own")


def say(group: Path, limit: object, used: int, **stat: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


def say_in_version_1(group: Path, limit: int, used: int, **stat: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


def test_files_that_were_read_leave_a_container_its_memory(container: Path) -> None:
    """A checkpoint of 50 GiB was read: the kernel keeps it in memory only until a program needs that memory."""
    say(container, 64 * GIB, 63 * GIB, anon=10 * GIB, file=53 * GIB, shmem=3 * GIB,
        inactive_file=45 * GIB, active_file=5 * GIB)  # fmt: skip
    assert free_bytes() == 51 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "free"), [("max", 90 * GIB, 100 * GIB), (64 * GIB, 4 * GIB, 60 * GIB), (200 * GIB, 0, 100 * GIB)]
)
def test_a_limit_is_a_limit(container: Path, limit: object, used: int, free: int) -> None:
    say(container, limit, used, inactive_file=0, active_file=0)
    assert free_bytes() == free


def test_without_a_container_the_host_has_what_it_has(container: Path) -> None:
    assert free_bytes() == 100 * GIB


def test_the_limit_of_a_service_of_systemd_and_of_what_it_is_within(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MemoryMax= is written into the service's own cgroup, not into the topmost, which has no such file."""
    be_in(container, monkeypatch, "0::/weft.slice/weftd.service")
    say(container / "weft.slice" / "weftd.service", 16 * GIB, 4 * GIB, inactive_file=GIB, active_file=GIB)
    assert free_bytes() == 14 * GIB
    say(container / "weft.slice", 8 * GIB, 6 * GIB, inactive_file=0, active_file=0)
    assert free_bytes() == 2 * GIB


def test_the_limits_of_a_kernel_with_version_1(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_in(container, monkeypatch, "9:name=systemd:/", "4:cpu,memory:/jobs/42", "0::/")
    say_in_version_1(container / "memory", 2**63 - 4096, 90 * GIB)
    assert free_bytes() == 100 * GIB
    say_in_version_1(container / "memory" / "jobs" / "42", 16 * GIB, 9 * GIB, inactive_file=GIB, active_file=GIB,
        total_inactive_file=3 * GIB, total_active_file=2 * GIB)  # fmt: skip
    assert free_bytes() == 12 * GIB


def test_a_container_that_is_not_told_where_it_lies_has_the_topmost_limit(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a namespace of cgroups it is told a path of the host, and shown its own cgroup as the topmost."""
    be_in(container, monkeypatch, "4:memory:/docker/0123456789ab")
    say_in_version_1(container / "memory", 8 * GIB, GIB)
    assert free_bytes() == 7 * GIB
