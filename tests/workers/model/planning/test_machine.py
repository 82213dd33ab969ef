"""What the machine says it has, against folders that say what a container's kernel would."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.model.planning import machine
from workers.model.planning.machine import free_bytes

GIB = 1 << 30


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_available_bytes", lambda: 100 * GIB)
    return tmp_path


def say(container: Path, limit: object, used: int, **stat: int) -> None:
    (container / "memory.max").write_text(f"{limit}\n")
    (container / "memory.current").write_text(f"{used}\n")
    (container / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


def test_files_that_were_read_leave_a_container_its_memory(container: Path) -> None:
    """A checkpoint of 50 GiB was read: the kernel keeps it for as long as nobody wants the memory."""
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
