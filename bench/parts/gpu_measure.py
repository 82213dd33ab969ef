"""How the benches of a GPU take times, and what they fit in its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: Left free for activations, logits and the allocator when adapters are counted.
RESERVE_BYTES = 32 << 30


def distinct_adapters(wanted: int, arena_bytes: int, free_bytes: int, reserve_bytes: int = RESERVE_BYTES) -> int:
    """How many adapters with their gradients fit; at least one."""
    return max(1, min(wanted, (free_bytes - reserve_bytes) // (2 * arena_bytes)))


def seconds_of(works: dict[str, Callable[[], None]], rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    """The median of each over interleaved rounds, after one that is not counted; `wait` waits for the device."""
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
    """Where one step's time on the device goes."""
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
