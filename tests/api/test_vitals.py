"""What /metrics says of processes and requests: true figures, in few series, and none about a tenant."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.server.gate import Gate
from api.server.prometheus import Stored, render
from api.server.vitals import vitals
from api.state.traffic import Traffic
from billing.money.alerts import MoneyGauges
from scheduler.journal.ending.meters import Meters
from scheduler.reports.waiting import oldest_s
from store.settings import FrontSettings
from tests.api.conftest import World
from tests.api.data import batch
from tests.api.test_prometheus import LINE, values

NOTHING = Stored(MoneyGauges(0, 0, None, 0, 0.0))


def test_figures_of_processes_are_those_of_the_kernel(tmp_path: Path) -> None:
    held = "import subprocess, sys; b = bytearray(64 << 20); print(flush=True); "
    inner = held + "sys.stdin.read()"
    outer = held + f"p = subprocess.Popen([sys.executable, '-c', {inner!r}], stdin=0); p.wait()"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        for _ in range(2):
            worker.stdout.readline()
        found = values(render(Meters(), {}, None, vitals(Traffic(), None, {"trainer": worker.pid}, tmp_path)))
        worker.stdin.close()
    assert 128 << 20 < found['weft_worker_resident_memory_bytes{role="trainer"}'] < 512 << 20
    assert found['weft_worker_open_fds{role="trainer"}'] >= 6
    assert found["process_resident_memory_bytes"] > 20 << 20
    assert found["process_open_fds"] == pytest.approx(len(os.listdir("/proc/self/fd")), abs=5)
    assert found["weft_data_free_bytes"] <= found["weft_data_size_bytes"]
    gone = values(render(Meters(), {}, None, vitals(Traffic(), None, {"trainer": worker.pid}, tmp_path)))
    assert gone['weft_worker_resident_memory_bytes{role="trainer"}'] == 0


def test_a_blocked_event_loop_is_seen(tmp_path: Path) -> None:
    traffic = Traffic()

    async def story() -> None:
        watching = asyncio.create_task(traffic.watch_loop())
        await asyncio.sleep(0.05)
        time.sleep(0.8)  # noqa: ASYNC251  this is what is to be seen
        await asyncio.sleep(0.05)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    asyncio.run(story())
    found = values(render(Meters(), {}, None, vitals(traffic, None, {}, tmp_path)))
    assert found["weft_loop_lag_seconds_sum"] >= 0.5
    assert found['weft_loop_lag_seconds_bucket{le="0.25"}'] == found["weft_loop_lag_seconds_count"] - 1


def test_every_line_is_one_of_the_format(world: World, tmp_path: Path) -> None:
    world.train(batch(world.run(), 1))
    world.http.get('/none"of{these}')
    gate = Gate(FrontSettings())
    for _ in range(2):
        gate.enter("10.0.0.1")
    gate.leave("10.0.0.1")
    gate.refused[503] += 1
    text = render(Meters(), {}, NOTHING, vitals(world.state.traffic, gate, {}, tmp_path))
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert values(text)["weft_http_connections"] == 1
    assert values(text)['weft_http_connections_refused_total{status="503"}'] == 1
    assert "these" not in text
    assert all(family.documentation for family in families)


def test_each_trainer_and_generator_has_its_own_figures() -> None:
    stats = {
        "trainer": {"tokens": 30, "replicas": {"trainer": {"tokens": 10, "runs": 1}, "trainer-2": {"tokens": 20}}},
        "generator": {"replicas": {"generator": {"steps": 7, "held": 2}}},
        "replica": {"name": "api-x", "leads": True, "redis": False},
    }
    text = render(Meters(), stats, NOTHING)
    found = values(text)
    assert all(LINE.match(line) for line in text.splitlines() if line[0] != "#")
    assert found['weft_trainer_replica_tokens_total{trainer="trainer-2"}'] == 20
    assert found['weft_trainer_runs{trainer="trainer"}'] == 1
    assert found['weft_generator_held{generator="generator"}'] == 2
    assert (found["weft_leads"], found["weft_redis_up"]) == (1, 0)
    many = {"trainer": {"replicas": {f"trainer-{n}": {"runs": 1} for n in range(1000)}}}
    assert render(Meters(), many, NOTHING).count("weft_trainer_runs{") == 256


def test_the_oldest_waiting_operation(world: World) -> None:
    run = world.run()
    first = world.train(batch(run, 1))["request_id"]
    world.train(batch(run, 2))
    later = datetime.now(UTC).timestamp() + 100

    def ages() -> dict[str, float]:
        with world.database.read() as session:
            return oldest_s(session, datetime.fromtimestamp(later, UTC))

    assert ages().keys() == {"create", "forward_backward"}
    before = ages()["forward_backward"]
    assert 100 <= before < 130
    world.finish(first, b"x", tokens=1)
    assert 100 <= ages()["forward_backward"] < before
    text = render(Meters(), {}, Stored(NOTHING.money, ages()))
    assert 'weft_op_oldest_age_seconds{kind="forward_backward"}' in values(text)


def test_without_the_database_the_rest_is_told() -> None:
    assert values(render(Meters(), {}, None))["weft_database_up"] == 0
    assert values(render(Meters(), {}, NOTHING))["weft_database_up"] == 1
