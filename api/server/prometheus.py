"""Prometheus' /metrics, in its text format, on a port of its own (`metrics_port` in the settings).

Base units, no labels of tenants, runs or keys: those are unbounded, and whoever may read this port may not read their
names. What belongs to one run is at /api/v1/weft/runs/{run_id}/health.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from billing.alerts import MoneyGauges
from billing.wallets import NUSD_PER_USD
from scheduler.journal.meters import BOUNDS_S, Histogram, Meters

#: A request for metrics has no body and few headers.
MAX_REQUEST_BYTES = 16 * 1024
REQUEST_S = 10.0

Sample = tuple[str, Mapping[str, str], float]


def render(meters: Meters, stats: Mapping[str, Any], money: MoneyGauges) -> str:
    """Everything, as Prometheus reads it."""
    queue, trainer, generator = (stats.get(name, {}) for name in ("queue", "trainer", "generator"))
    families = [
        _family("weft_ops_submitted_total", "counter", "Operations accepted.", _by_kind(meters.submitted)),
        _family(
            "weft_ops_ended_total",
            "counter",
            "Operations ended.",
            [("", {"kind": kind, "state": state}, n) for (kind, state), n in sorted(meters.ended.items())],
        ),
        _histograms("weft_op_queue_seconds", "From acceptance to a worker.", meters.queue),
        _histograms("weft_op_exec_seconds", "In workers' hands.", meters.execution),
        _family("weft_settle_lag_seconds", "histogram", "From computed to told.", _buckets(meters.settling, {})),
        _gauge("weft_queue_depth", "Operations not ended.", queue.get("open", 0)),
        _gauge("weft_ops_running", "Operations in workers' hands.", queue.get("running", 0)),
        _gauge("weft_runs", "Runs that take operations.", queue.get("runs", 0)),
        _counter("weft_trainer_passes_total", "Passes.", trainer.get("passes", 0)),
        _counter(
            "weft_trainer_shared_passes_total", "Passes of several organisations.", trainer.get("shared_passes", 0)
        ),
        _counter("weft_trainer_tokens_total", "Tokens in passes.", trainer.get("tokens", 0)),
        _counter("weft_trainer_busy_seconds_total", "Computing passes.", trainer.get("busy_s", 0.0)),
        _counter("weft_trainers_lost_total", "Trainers that were lost.", trainer.get("lost", 0)),
        _counter("weft_generator_steps_total", "Decode steps.", generator.get("steps", 0)),
        _counter("weft_generator_slot_steps_busy_total", "Slots that worked.", generator.get("slots_busy", 0)),
        _counter("weft_generator_slot_steps_total", "Slots there were.", generator.get("slots_offered", 0)),
        _counter("weft_generator_busy_seconds_total", "Decoding.", generator.get("busy_s", 0.0)),
        _counter("weft_generators_lost_total", "Generators that were lost.", generator.get("lost", 0)),
        *_refusals(meters),
        *_money(money),
    ]
    return "".join(families)


def _refusals(meters: Meters) -> list[str]:
    denied = [("", {"scope": scope}, count) for scope, count in sorted(meters.denied.items())]
    limited = [("", {"reason": reason}, count) for reason, count in sorted(meters.rate_limited.items())]
    return [
        _family("weft_budget_denied_total", "counter", "Operations refused by a wallet or a budget.", denied),
        _family("weft_rate_limited_total", "counter", "Requests told to wait.", limited),
        _counter("weft_webhook_duplicates_total", "Webhooks that came again.", meters.webhook_duplicates),
    ]


def _money(money: MoneyGauges) -> list[str]:
    """Of all servers on the database together."""
    drift: list[Sample] = [] if money.drift_nusd is None else [("", {}, money.drift_nusd)]
    jobs = [("", {"job": name}, at.timestamp()) for name, at in money.succeeded.items()]
    return [
        _gauge("weft_holds_open", "Operations that money is held for.", money.holds_open),
        _gauge("weft_hold_amount_usd", "Held for them.", money.held_nusd / NUSD_PER_USD),
        _family("weft_ledger_drift_nusd", "gauge", "By how much the books differed when last compared.", drift),
        _gauge("weft_outbox_pending", "Meter events that Stripe has not confirmed.", money.outbox_pending),
        _gauge("weft_outbox_oldest_age_seconds", "Age of the oldest of them.", money.outbox_oldest_age_s),
        _family("weft_job_last_success_timestamp_seconds", "gauge", "When a job last succeeded.", jobs),
    ]


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
                b"HTTP/1.1 %b\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body)
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


def _family(name: str, kind: str, about: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    for suffix, labels, value in samples:
        shown = ",".join(f'{key}="{text}"' for key, text in labels.items())
        lines.append(f"{name}{suffix}{f'{{{shown}}}' if shown else ''} {value}")
    return "\n".join(lines) + "\n"


def _gauge(name: str, about: str, value: float) -> str:
    return _family(name, "gauge", about, [("", {}, value)])


def _counter(name: str, about: str, value: float) -> str:
    return _family(name, "counter", about, [("", {}, value)])


def _by_kind(counts: Mapping[str, int]) -> list[Sample]:
    return [("", {"kind": kind}, count) for kind, count in sorted(counts.items())]


def _histograms(name: str, about: str, by_kind: Mapping[str, Histogram]) -> str:
    samples = [sample for kind, histogram in sorted(by_kind.items()) for sample in _buckets(histogram, {"kind": kind})]
    return _family(name, "histogram", about, samples)


def _buckets(histogram: Histogram, labels: Mapping[str, str]) -> list[Sample]:
    samples: list[Sample] = []
    below = 0
    for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], histogram.counts, strict=True):
        below += count
        samples.append(("_bucket", {**labels, "le": bound}, below))
    return [*samples, ("_sum", labels, histogram.total), ("_count", labels, below)]
