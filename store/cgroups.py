"""The limits of this process in a container or a systemd service. They are set on its cgroup, or on one around that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: The folder with the limits of all cgroups, and the file that names this process's cgroups.
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


class Group(NamedTuple):
    folder: Path
    version: int


def own_groups(controller: str) -> Iterator[Group]:
    """This process's group of a controller ("memory", "cpu"), and those around it."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, version = CGROUPS, 2
        elif controller in controllers.split(","):
            mount, version = CGROUPS / controller, 1
        else:
            continue
        own = mount / path.lstrip("/")
        # A container that does not see its own cgroup's path sees it as the topmost one.
        for folder in (own, *own.parents[: len(own.parts) - len(mount.parts)]):
            yield Group(folder, version)


def number_in(file: Path) -> int | None:
    """The number in a file; None if there is no such file, or no number because there is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def cores() -> int:
    """How many processor cores this process may use at the same time, at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(1, min([allowed, *_quotas()]))


def _quotas() -> Iterator[int]:
    """The limit of each group that has one, in whole cores, rounded up."""
    for folder, version in own_groups("cpu"):
        if version == 2:
            quota, period = _words(folder / "cpu.max")
        else:
            quota, period = number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            yield -(-quota // period)


def _words(file: Path) -> tuple[int | None, int | None]:
    """A limit in cores: `200000 100000` is as much as two cores in each 100 ms; `max 100000` is none."""
    try:
        quota, period = file.read_text().split()
        return int(quota), int(period)
    except (OSError, ValueError):
        return None, None
