"""The memory that this machine has, without torch: the server plans with it before a worker starts."""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Where nothing is known (not Linux).
UNKNOWN_BYTES = 1 << 62

#: Of the container that this process is in.
CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Of the host's memory, what can be allocated now. In a container the cgroup's limit applies as well."""
    free = _available_bytes()
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return max(0, free if limit is None or used is None else min(free, limit - used + _cached_bytes()))


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


def _cgroup_bytes(name: str) -> int | None:
    try:
        return int((CGROUP / name).read_text())
    except (OSError, ValueError):
        return None


def _cached_bytes() -> int:
    """Of what a container uses, pages of files: the kernel gives them up for whoever allocates, and counts them as
    available on a host, too. Reading a checkpoint fills all of a limit with them."""
    try:
        found = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return int(found["active_file"]) + int(found["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0
