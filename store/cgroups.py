"""What this process may use of its machine where a container or a service of systemd has limits, which are written into
its cgroup or one that it is within.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Where the limits are, and which groups this process is in.
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


class Group(NamedTuple):
    folder: Path
    version: int


def own_groups(controller: str) -> Iterator[Group]:
    """This process's group of a controller ("memory", "cpu"), and those that it is within."""
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
        # A container that is not shown where its own cgroup lies sees it as the topmost one.
        for folder in (own, *own.parents[: len(own.parts) - len(mount.parts)]):
            yield Group(folder, version)


def number_in(file: Path) -> int | None:
    """None where there is no such file, or no number, as of what has no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def cores() -> int:
    """Of the processor's, how many this process may use at the same time, at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(1, min([allowed, *_quotas()]))


def _quotas() -> Iterator[int]:
    """The processor's time of each group that has a limit, in whole cores: a part of one is one more thread."""
    for folder, version in own_groups("cpu"):
        if version == 2:
            quota, period = _words(folder / "cpu.max")
        else:
            quota, period = number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            yield -(-quota // period)


def _words(file: Path) -> tuple[int | None, int | None]:
    """`200000 100000`: of each 100 ms as much as two cores have. `max 100000`: no limit."""
    try:
        quota, period = file.read_text().split()
        return int(quota), int(period)
    except (OSError, ValueError):
        return None, None
