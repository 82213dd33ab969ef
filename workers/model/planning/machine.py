"""The memory that this machine has, without torch: the server plans with it before a worker starts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from store.cgroups import number_in, own_groups

#: The value where nothing is known (not on Linux).
UNKNOWN_BYTES = 1 << 62
#: By the version of cgroups: the file of the limit, the file of the use, and the prefix of the names in memory.stat.
_FILES = {2: ("memory.max", "memory.current", ""), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}


def free_bytes() -> int:
    """How much of the host's memory can be allocated now, within the limits of this process's cgroup and those around
    it."""
    return max(0, min([_available_bytes(), *_left_in_cgroups()]))


def cuda_bytes() -> list[int]:
    """The memory of each CUDA device that torch would find, from the driver; none where there is none, or a torch that
    cannot use it."""
    try:
        if version("torch").endswith("+cpu"):
            return []
        cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except (PackageNotFoundError, OSError):
        return []
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for number in range(count.value):
        device, size = ctypes.c_int(), ctypes.c_size_t()
        if cuda.cuDeviceGet(ctypes.byref(device), number) or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device):
            return []
        found.append(size.value)
    return found


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return UNKNOWN_BYTES
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), UNKNOWN_BYTES)


def _left_in_cgroups() -> Iterator[int]:
    """The bytes that are left in each cgroup with a limit."""
    for group, of in own_groups("memory"):
        limit, used, stat = _FILES[of]
        if (most := number_in(group / limit)) is not None and (now := number_in(group / used)) is not None:
            yield most - now + _cached_bytes(group, stat)


def _cached_bytes(group: Path, stat: str) -> int:
    """How much of a cgroup's memory is pages of files: the kernel gives them up for whoever allocates, and counts them
    as available on a host, too. Reading a checkpoint fills a whole limit with them."""
    try:
        found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(found[f"{stat}active_file"]) + int(found[f"{stat}inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0
