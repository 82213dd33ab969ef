"""Prometheus' /metrics, in its text format, on a port of its own (`metrics_port` in the settings).

Base units, no labels of tenants, runs or keys: those are unbounded, and a reader of this port may not read their
names. What belongs to one run is at /api/v1/weft/runs/{run_id}/health.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.server.vitals import alone, counter, gauge, histogram
from billing.money.alerts import MoneyGauges
from billing.money.wallets import NUSD_PER_USD
from scheduler.jobs.catalogue import JOBS
from scheduler.journal.ending.meters import Histogram, Meters

#: How many bytes a request for metrics may have: it has no body and few headers.
MAX_REQUEST_BYTES = 16 * 1024
REQUEST_S = 10.0


@dataclass(frozen=True)
class Stored:
    """Facts that only the database has, over all servers on it; `waiting_s` is by kind of operation
    (`scheduler.reports.waiting`)."""

    money: MoneyGauges
    waiting_s: Mapping[str, float] = field(default_factory=dict)


def render(meters: Meters, stats: Mapping[str, Any], stored: Stored | None, others: Iterable[Metric] = ()) -> str:
    """All metrics in Prometheus' format; `stored` is None while the database does not answer."""
    families = [*_operations(meters, stats), *_replicas(stats), *_refusals(meters), *others]
    families.append(_gauge("weft_database_up", "Whether the database answered just now.", stored is not None))
    if stored is not None:
        about = "Age of the oldest operation that has not ended."
        oldest = gauge("weft_op_oldest_age_seconds", about, ["kind"], alone(stored.waiting_s))
        families += [*_money(stored.money), oldest]
    return generate_latest(_Families(families)).decode()


_gauge, _counter = GaugeMetricFamily, CounterMetricFamily
#: Kinds of workers, by their names in the statistics.
WORKERS = ("trainer", "generator")
#: Metrics of each trainer and each generator: the name in the statistics, Prometheus' name, and the help text.
_EACH = {
    "trainer": {
        "runs": ("weft_trainer_runs", "Runs that live on a trainer."),
        "passes": ("weft_trainer_replica_passes_total", "Passes of a trainer."),
        "tokens": ("weft_trainer_replica_tokens_total", "Tokens in passes of a trainer."),
        "busy_s": ("weft_trainer_replica_busy_seconds_total", "Time that a trainer computed."),
    },
    "generator": {
        "held": ("weft_generator_held", "Samples in the hands of a generator."),
        "steps": ("weft_generator_replica_steps_total", "Decode steps of a generator."),
        "slots_busy": ("weft_generator_replica_slot_steps_busy_total", "Slots of a generator that worked."),
        "slots_offered": ("weft_generator_replica_slot_steps_total", "Slots of a generator that there were."),
        "drafted": ("weft_generator_replica_drafted_tokens_total", "Tokens that a generator tried ahead."),
        "accepted": ("weft_generator_replica_accepted_tokens_total", "Tokens tried ahead that came to be drawn."),
    },
}
#: Work that waits; left out if only the database knows it and it does not answer.
_QUEUE = {
    "open": ("weft_queue_depth", "Operations not ended."),
    "running": ("weft_ops_running", "Operations in workers' hands."),
    "runs": ("weft_runs", "Runs that take operations."),
}
#: How many trainers, and generators, are listed by name.
MOST_REPLICAS = 256


class _Families(Collector):
    """Stands in for a registry in `generate_latest`: our numbers are counted elsewhere."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _operations(meters: Meters, stats: Mapping[str, Any]) -> list[Metric]:
    queue, trainer, generator = (stats.get(name, {}) for name in ("queue", "trainer", "generator"))
    started: dict[tuple[str, ...], float] = {(one["role"],): one["restarts"] for one in stats.get("workers", [])}
    loading = {(role,): float(len(stats.get(role, {}).get("loading", {}))) for role in WORKERS}
    settling = histogram("weft_settle_lag_seconds", "From computed to stored.", [], {(): meters.settling})
    return [
        counter("weft_ops_submitted_total", "Operations accepted.", ["kind"], alone(meters.submitted)),
        counter("weft_ops_ended_total", "Operations ended.", ["kind", "state"], meters.ended),
        _by_kind("weft_op_queue_seconds", "From acceptance to a worker.", meters.queue),
        _by_kind("weft_op_exec_seconds", "In workers' hands.", meters.execution),
        settling,
        counter("weft_worker_restarts_total", "Starts of a worker after its first.", ["role"], started),
        gauge("weft_workers_loading", "Workers that read their models.", ["role"], loading),
        *(_gauge(name, about, queue[count]) for count, (name, about) in _QUEUE.items() if count in queue),
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
        _counter("weft_generator_drafted_tokens_total", "Tokens tried ahead.", generator.get("drafted", 0)),
        _counter("weft_generator_accepted_tokens_total", "Of them drawn.", generator.get("accepted", 0)),
        _counter("weft_generator_busy_seconds_total", "Decoding.", generator.get("busy_s", 0.0)),
        _counter("weft_generators_lost_total", "Generators that were lost.", generator.get("lost", 0)),
    ]


def _replicas(stats: Mapping[str, Any]) -> Iterable[Metric]:
    """Metrics of each trainer and generator present; and of this server, if it is a replica."""
    for worker, names in _EACH.items():
        found = list(stats.get(worker, {}).get("replicas", {}).items())[:MOST_REPLICAS]
        for count, (name, about) in names.items():
            values: dict[tuple[str, ...], float] = {(one,): counts[count] for one, counts in found if count in counts}
            family = counter if name.endswith("_total") else gauge
            yield family(name, about, [worker], values)
    if (replica := stats.get("replica")) is not None:
        yield _gauge("weft_leads", "Whether this server leads training.", replica["leads"])
        yield _gauge("weft_redis_up", "Whether Redis is reached.", replica["redis"])


def _refusals(meters: Meters) -> list[Metric]:
    about = "Operations refused by a wallet or a budget."
    return [
        counter("weft_budget_denied_total", about, ["scope"], alone(meters.denied)),
        counter("weft_rate_limited_total", "Requests told to wait.", ["reason"], alone(meters.rate_limited)),
        _counter("weft_webhook_duplicates_total", "Webhooks that came again.", meters.webhook_duplicates),
    ]


def _money(money: MoneyGauges) -> list[Metric]:
    """Money, over all servers on the database."""
    drift = GaugeMetricFamily("weft_ledger_drift_nusd", "By how much the books differed when last compared.")
    if money.drift_nusd is not None:
        drift.add_metric([], money.drift_nusd)
    jobs: dict[tuple[str, ...], float] = {(name,): at.timestamp() for name, at in money.succeeded.items()}
    runs = {name: job for name, job in JOBS.items() if money.time_believed or not job.final}
    due: dict[tuple[str, ...], float] = {(name,): job.every_s for name, job in runs.items()}
    alerts: dict[tuple[str, ...], float] = {(kind,): at.timestamp() for kind, at in money.alerts.items()}
    raised = "When the latest alert for the operator was raised that is not over."
    return [
        _gauge("weft_holds_open", "Operations that money is held for.", money.holds_open),
        _gauge("weft_hold_amount_usd", "Held for them.", money.held_nusd / NUSD_PER_USD),
        drift,
        _gauge("weft_outbox_pending", "Meter events that Stripe has not confirmed.", money.outbox_pending),
        _gauge("weft_outbox_oldest_age_seconds", "Age of the oldest of them.", money.outbox_oldest_age_s),
        gauge("weft_job_last_success_timestamp_seconds", "When a job last succeeded.", ["name"], jobs),
        gauge("weft_job_every_seconds", "How often a job is to run, unless it waits.", ["name"], due),
        gauge("weft_alert_raised_timestamp_seconds", raised, ["kind"], alerts),
    ]


def _by_kind(name: str, about: str, found: Mapping[str, Histogram]) -> Metric:
    return histogram(name, about, ["kind"], {(kind,): one for kind, one in found.items()})


@asynccontextmanager
async def metrics_server(sock: socket.socket, text: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
    """Answer GET /metrics at that address within the block."""

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

    server = await asyncio.start_server(answer, sock=sock, limit=MAX_REQUEST_BYTES)
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()
