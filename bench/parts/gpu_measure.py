"""How the benches of a GPU take times, what they fit in its memory, and what is used of that."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from workers.model.planning.machine import cuda_bytes

#: Bytes left free for activations, logits and the allocator when adapters are counted.
RESERVE_BYTES = 32 << 30


@dataclass
class Device:
    """The first GPU as nvidia-smi sees it; without nvidia-smi as torch does, which knows no other processes."""

    total_bytes: int
    smi: str | None

    @classmethod
    def here(cls) -> Device | None:
        return cls(cuda_bytes()[0], shutil.which("nvidia-smi")) if torch.cuda.is_available() else None

    @property
    def name(self) -> str:
        return self._asked("--query-gpu=name")[0][0] if self.smi else torch.cuda.get_device_name(0)

    def used_bytes(self) -> int:
        if self.smi:
            return int(self._asked("--query-gpu=memory.used")[0][0]) << 20
        free, total = torch.cuda.mem_get_info(0)
        return total - free

    def processes(self) -> list[dict[str, str]]:
        """Processes on the GPU; in a container nvidia-smi may not know them."""
        found = []
        for pid, used in self._asked("--query-compute-apps=pid,used_memory") if self.smi else []:
            name = ""
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            found.append({"pid": pid, "name": name, "used_mib": used})
        return found

    def _asked(self, query: str) -> list[list[str]]:
        command = [str(self.smi), query, "--format=csv,noheader,nounits", "--id=0"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return [[cell.strip() for cell in line.split(",")] for line in lines]


def distinct_adapters(wanted: int, arena_bytes: int, free_bytes: int, reserve_bytes: int = RESERVE_BYTES) -> int:
    """How many adapters with their gradients fit in memory; at least one."""
    return max(1, min(wanted, (free_bytes - reserve_bytes) // (2 * arena_bytes)))


def seconds_of(works: dict[str, Callable[[], None]], rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    """The median seconds of each function over interleaved rounds, after one that is not counted; `wait` waits for the
    device."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            wait()
            began = time.perf_counter()
            work()
            wait()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def top_kernels(work: Callable[[], None], count: int = 15) -> list[dict[str, Any]]:
    """The kernels that take most of one step's time on the device."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) or 1.0
    return [
        {
            "kernel": event.key[:120],
            "ms": round(event.self_device_time_total / 1e3, 3),
            "share": round(event.self_device_time_total / total, 4),
            "calls": event.count,
        }
        for event in events[:count]
    ]
