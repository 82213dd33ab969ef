"""Metrics about the processes themselves: requests, memory, files, the event loop, the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from api.server.gate import Gate
from api.state.traffic import Traffic
from scheduler.journal.ending.meters import BOUNDS_S, Histogram

#: The values of a family's labels.
K = TypeVar("K", bound=tuple[str, ...])

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Metrics of this process under Prometheus' standard names (process_...): memory, files, CPU, start.
_this_process = ProcessCollector(registry=None)


def vitals(traffic: Traffic, gate: Gate | None, processes: Mapping[str, int], data_dir: Path) -> list[Metric]:
    """`processes` are this process's workers, by role."""
    return [*_http(traffic), *_connections(gate), *_this_process.collect(), *_workers(processes), *_disk(data_dir)]


def histogram(name: str, about: str, labels: list[str], found: Mapping[K, Histogram]) -> Metric:
    """Histograms of one family, by the values of their `labels`."""
    family = HistogramMetricFamily(name, about, labels=labels)
    for values, one in sorted(found.items()):
        family.add_metric(list(values), _buckets(one), one.total)
    return family


def counter(name: str, about: str, labels: list[str], found: Mapping[K, float]) -> Metric:
    family = CounterMetricFamily(name, about, labels=labels)
    for values, count in sorted(found.items()):
        family.add_metric(list(values), count)
    return family


def gauge(name: str, about: str, labels: list[str], found: Mapping[K, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=labels)
    for values, value in sorted(found.items()):
        family.add_metric(list(values), value)
    return family


def _buckets(found: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts: how many values were at or below each bound."""
    return list(zip([*map(str, BOUNDS_S), "+Inf"], accumulate(found.counts), strict=True))


def _http(traffic: Traffic) -> Iterable[Metric]:
    by_route = ["route", "method"]
    yield counter("weft_http_requests_total", "Requests answered.", [*by_route, "status"], traffic.answered)
    about = "From a request's headers to the end of its answer; polls wait for results."
    yield histogram("weft_http_request_seconds", about, by_route, traffic.seconds)
    yield GaugeMetricFamily("weft_http_requests_in_flight", "Requests being answered.", traffic.in_flight)
    received, sent = alone(traffic.received_bytes), alone(traffic.sent_bytes)
    yield counter("weft_http_received_bytes_total", "Bodies of requests.", ["route"], received)
    yield counter("weft_http_sent_bytes_total", "Bodies of answers.", ["route"], sent)
    yield histogram("weft_loop_lag_seconds", "How late the event loop is.", [], {(): traffic.loop_lag})


def alone(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """Counters with a single label."""
    return {(name,): count for name, count in counts.items()}


def _connections(gate: Gate | None) -> Iterable[Metric]:
    if gate is not None:
        yield GaugeMetricFamily("weft_http_connections", "Connections that are open.", gate.count)
        refused: dict[tuple[str, ...], float] = {(str(status),): count for status, count in gate.refused.items()}
        yield counter("weft_http_connections_refused_total", "Connections turned away.", ["status"], refused)


def _workers(processes: Mapping[str, int]) -> Iterable[Metric]:
    families = {(role,): _family(pid) for role, pid in processes.items()}
    resident: dict[tuple[str, ...], float] = {key: sum(map(_resident, pids)) for key, pids in families.items()}
    files: dict[tuple[str, ...], float] = {key: sum(map(_files, pids)) for key, pids in families.items()}
    yield gauge("weft_worker_resident_memory_bytes", "Memory of a worker and its children.", ["role"], resident)
    yield gauge("weft_worker_open_fds", "Files that a worker and its children have open.", ["role"], files)


def _family(pid: int) -> list[int]:
    """A process and all its descendants; without /proc only itself."""
    found = [pid]
    for one in found:
        with suppress(OSError):
            found += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    return found


def _resident(pid: int) -> int:
    """Resident bytes; 0 for a process that is gone."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


def _files(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _disk(data_dir: Path) -> Iterable[Metric]:
    with suppress(OSError):
        usage = shutil.disk_usage(data_dir)
        yield GaugeMetricFamily("weft_data_free_bytes", "Room on the disk of the data folder.", usage.free)
        yield GaugeMetricFamily("weft_data_size_bytes", "That disk.", usage.total)
