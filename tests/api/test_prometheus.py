"""/metrics: what Prometheus would read."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatch
from pathlib import Path

from api.server.prometheus import WORKERS, Stored, metrics_server, render
from api.server.serve import listening
from billing.money.alerts import MoneyGauges
from scheduler.jobs.catalogue import JOBS
from scheduler.journal.ending.meters import BOUNDS_S, Meters
from scheduler.order.operations import Operation, Outcome
from scheduler.order.plans import BODY_ONLY
from scheduler.order.timings import Stretch

START = datetime(2026, 11, 1, tzinfo=UTC)
NO_MONEY = Stored(MoneyGauges(0, 0, None, 0, 0.0))
LINE = re.compile(r'^[a-z_]+(\{[a-z_]+="[^"\\]*"(,[a-z_]+="[^"\\]*")*\})? (-?[0-9.e+]+|inf)$')


def operation(kind: str, queued_s: float, worked_s: float, error: str | None = None) -> Operation:
    op = Operation("id", "acme", "s", "acme-run", 1, kind, "m", 10, "", BODY_ONLY, START)
    op.timings.begin(Stretch(1, 1, 1, 10, START + timedelta(seconds=queued_s)))
    op.timings.done(START + timedelta(seconds=queued_s + worked_s))
    op.outcome = Outcome(error=error)
    return op


def filled() -> Meters:
    meters = Meters()
    for queued_s in (0.003, 0.2, 10_000):
        op = operation("sample", queued_s, 2.0)
        meters.accepted(op)
        meters.closed(op, START + timedelta(seconds=queued_s + 2.5))
    meters.closed(operation("optim_step", 0, 0, "no"), START)
    return meters


def values(text: str) -> dict[str, float]:
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
    }


def test_an_operator_sees_which_worker_starts_again() -> None:
    workers = [{"role": "trainer", "restarts": 2}, {"role": "generator", "restarts": 0}]
    found = values(render(Meters(), {"workers": workers}, NO_MONEY))
    assert found['weft_worker_restarts_total{role="trainer"}'] == 2
    assert found['weft_worker_restarts_total{role="generator"}'] == 0


def test_what_waits_for_the_time_to_be_right_is_not_late() -> None:
    def due(*, time_believed: bool) -> set[str]:
        found = values(render(Meters(), {}, Stored(MoneyGauges(0, 0, None, 0, 0.0, time_believed=time_believed))))
        return {name for name in JOBS if f'weft_job_every_seconds{{name="{name}"}}' in found}

    assert due(time_believed=True) == set(JOBS)
    assert due(time_believed=False) == {name for name, job in JOBS.items() if not job.final}


def test_an_operator_sees_how_many_workers_load() -> None:
    loading = {"trainer": {"loading": {"a": 3.0}}, "generator": {"loading": {}}}
    found = values(render(Meters(), loading, NO_MONEY))
    assert [found[f'weft_workers_loading{{role="{role}"}}'] for role in WORKERS] == [1, 0]


def test_every_line_is_of_the_format_and_names_no_tenant() -> None:
    text = render(filled(), {"trainer": {"busy_s": 1.5, "passes": 2}, "generator": {"slots_busy": 7}}, NO_MONEY)
    assert all(LINE.match(line) for line in text.splitlines() if not line.startswith("#"))
    families = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert len(families) == len(dict(families))
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in families)
    assert "acme" not in text


def test_every_metric_is_on_the_page_of_operators() -> None:
    text = render(filled(), {"trainer": {"busy_s": 1.5}, "generator": {"slots_busy": 7}}, NO_MONEY)
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    said = re.findall(r"`((?:weft|process)_[a-z_]+\*?)", page)
    told = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert [name for name in told if not any(fnmatch(name, each) for each in said)] == []


def test_histograms_are_cumulative() -> None:
    found = values(render(filled(), {}, NO_MONEY))
    buckets = [found[f'weft_op_queue_seconds_bucket{{kind="sample",le="{bound}"}}'] for bound in (*BOUNDS_S, "+Inf")]
    assert buckets == sorted(buckets)
    assert (buckets[0], buckets[BOUNDS_S.index(0.25)], buckets[-2], buckets[-1]) == (1, 2, 2, 3)
    assert found['weft_op_exec_seconds_sum{kind="sample"}'] == 6.0
    assert found["weft_settle_lag_seconds_count"] == 4


def test_counters_and_gauges() -> None:
    stats = {
        "queue": {"open": 5},
        "trainer": {"busy_s": 1.5},
        "generator": {"slots_busy": 7, "drafted": 9, "accepted": 8},
    }
    found = values(render(filled(), stats, NO_MONEY))
    assert found['weft_ops_submitted_total{kind="sample"}'] == 3
    assert found['weft_ops_ended_total{kind="optim_step",state="failed"}'] == 1
    assert found["weft_queue_depth"] == 5
    assert found["weft_trainer_busy_seconds_total"] == 1.5
    assert found["weft_generator_slot_steps_busy_total"] == 7
    assert found["weft_generator_drafted_tokens_total"] == 9
    assert found["weft_generator_accepted_tokens_total"] == 8


def test_the_server_answers_get_metrics_and_nothing_else() -> None:
    async def ask(port: int, line: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{line} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer.decode()

    async def up() -> str:
        return "weft_up 1\n"

    async def story() -> None:
        with listening("127.0.0.1", 0) as sock:
            async with metrics_server(sock, up):
                port = sock.getsockname()[1]
                good = await ask(port, "GET /metrics")
                assert good.startswith("HTTP/1.1 200")
                assert good.endswith("\r\n\r\nweft_up 1\n")
                for line in ("POST /metrics", "GET /", "GET", "nonsense"):
                    assert (await ask(port, line)).startswith("HTTP/1.1 404")

    asyncio.run(story())
