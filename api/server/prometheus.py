"""Prometheus' /metrics, in its text format, on a port of its own (`metrics_port` in the settings).

Base units, no labels of tenants, runs or keys: those are unbounded, and a reader of this port may not read their
names. What belongs to one run is at /api/v1/weft/runs/{run_id}/health.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from billing.alerts import MoneyGauges
from billing.wallets import NUSD_PER_USD
from scheduler.journal.ending.meters import BOUNDS_S, Histogram, Meters

#: A request for metrics has no body and few headers.
MAX_REQUEST_BYTES = 16 * 1024
REQUEST_S = 10.0


def render(meters: Meters, stats: Mapping[str, Any], money: MoneyGauges) -> str:
    """Everything, as Prometheus reads it."""
    return generate_latest(_Families([*_operations(meters, stats), *_refusals(meters), *_money(money)])).decode()


class _Families(Collector):
    """What `generate_latest` reads instead of a registry: our numbers are counted elsewhere."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _operations(meters: Meters, stats: Mapping[str, Any]) -> list[Metric]:
    queue, trainer, generator = (stats.get(name, {}) for name in ("queue", "trainer", "generator"))
    submitted = CounterMetricFamily("weft_ops_submitted_total", "Operations accepted.", labels=["kind"])
    for kind, count in sorted(meters.submitted.items()):
        submitted.add_metric([kind], count)
    ended = CounterMetricFamily("weft_ops_ended_total", "Operations ended.", labels=["kind", "state"])
    for (kind, state), count in sorted(meters.ended.items()):
        ended.add_metric([kind, state], count)
    restarts = CounterMetricFamily("weft_worker_restarts_total", "Starts of a worker after its first.", labels=["role"])
    for worker in stats.get("workers", []):
        restarts.add_metric([worker["role"]], worker["restarts"])
    settling = HistogramMetricFamily("weft_settle_lag_seconds", "From computed to told.")
    settling.add_metric([], _buckets(meters.settling), meters.settling.total)
    return [
        submitted,
        ended,
        _by_kind("weft_op_queue_seconds", "From acceptance to a worker.", meters.queue),
        _by_kind("weft_op_exec_seconds", "In workers' hands.", meters.execution),
        settling,
        restarts,
        _gauge("weft_queue_depth", "Operations not ended.", queue.get("open", 0)),
        _gauge("weft_ops_running", "Operations in workers' hands.", queue.get("running", 0)),
        _gauge("weft_runs", "Runs that take operations.", queue.get("runs", 0)),
        _counter("weft_trainer_passes_total", "Passes.", trainer.get("passes", 0)),
        _counter(
            "weft_trainer_shared_passes_total", "Passes of several organisations.", trainer.get("shared_passes", 0)
        ),
        _counter("weft_trainer_tokens_total", "Tokens in passes.", trainer.get("tokens", 0)),
        _counter("weft_trainer_busy_seconds_total", "Computing passes.", trainer.get("busy_s", 0.0)),
        _gauge("weft_trainers", "Trainers that are here.", len(trainer.get("replicas", {}))),
        _counter("weft_runs_moved_total", "Runs handed over to another trainer.", trainer.get("moves", 0)),
        _counter("weft_trainers_lost_total", "Trainers that were lost.", trainer.get("lost", 0)),
        _counter("weft_generator_steps_total", "Decode steps.", generator.get("steps", 0)),
        _counter("weft_generator_slot_steps_busy_total", "Slots that worked.", generator.get("slots_busy", 0)),
        _counter("weft_generator_slot_steps_total", "Slots there were.", generator.get("slots_offered", 0)),
        _counter("weft_generator_busy_seconds_total", "Decoding.", generator.get("busy_s", 0.0)),
        _counter("weft_generators_lost_total", "Generators that were lost.", generator.get("lost", 0)),
    ]


def _refusals(meters: Meters) -> list[Metric]:
    denied = CounterMetricFamily(
        "weft_budget_denied_total", "Operations refused by a wallet or a budget.", labels=["scope"]
    )
    for scope, count in sorted(meters.denied.items()):
        denied.add_metric([scope], count)
    limited = CounterMetricFamily("weft_rate_limited_total", "Requests told to wait.", labels=["reason"])
    for reason, count in sorted(meters.rate_limited.items()):
        limited.add_metric([reason], count)
    duplicates = _counter("weft_webhook_duplicates_total", "Webhooks that came again.", meters.webhook_duplicates)
    return [denied, limited, duplicates]


def _money(money: MoneyGauges) -> list[Metric]:
    """Of all servers on the database together."""
    drift = GaugeMetricFamily("weft_ledger_drift_nusd", "By how much the books differed when last compared.")
    if money.drift_nusd is not None:
        drift.add_metric([], money.drift_nusd)
    jobs = GaugeMetricFamily("weft_job_last_success_timestamp_seconds", "When a job last succeeded.", labels=["job"])
    for name, at in money.succeeded.items():
        jobs.add_metric([name], at.timestamp())
    return [
        _gauge("weft_holds_open", "Operations that money is held for.", money.holds_open),
        _gauge("weft_hold_amount_usd", "Held for them.", money.held_nusd / NUSD_PER_USD),
        drift,
        _gauge("weft_outbox_pending", "Meter events that Stripe has not confirmed.", money.outbox_pending),
        _gauge("weft_outbox_oldest_age_seconds", "Age of the oldest of them.", money.outbox_oldest_age_s),
        jobs,
    ]


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(name, about, value)


def _by_kind(name: str, about: str, histograms: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, about, labels=["kind"])
    for kind, histogram in sorted(histograms.items()):
        family.add_metric([kind], _buckets(histogram), histogram.total)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """How many were at or below each bound."""
    return list(zip([*map(str, BOUNDS_S), "+Inf"], accumulate(histogram.counts), strict=True))


@asynccontextmanager
async def metrics_server(host: str, port: int, text: Callable[[], Awaitable[str]]) -> AsyncIterator[int]:
    """Answer GET /metrics at that address meanwhile; yields the port, which `port` 0 leaves to the system."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S)
            target = head.split(b"\r\n", 1)[0].split(b" ")
            found = target[:1] == [b"GET"] and target[1:2] == [b"/metrics"]
            body = (await text() if found else "only GET /metrics is here\n").encode()
            status = b"200 OK" if found else b"404 Not Found"
            writer.write(
                b"HTTP/1.1 %b\r\ncontent-type: %b\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b"
                % (status, CONTENT_TYPE_PLAIN_0_0_4.encode(), len(body), body)
            )
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, host, port, limit=MAX_REQUEST_BYTES)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
