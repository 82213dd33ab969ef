"""The processes of a server that is started as an operator does: the memory they take, and that none is left behind."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import tinker

from tests.e2e.conftest import BASE_MODEL, BIN, named
from tests.e2e.data import prompt
from tests.e2e.production import Production, production_of
from tests.e2e.test_crashes import train
from tests.servers import PostgresServer
from tests.waiting import until

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="workers are forked on Linux alone"),
]
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


def test_workers_share_what_is_imported_and_none_outlives_the_server(tmp_path: Path) -> None:
    command = [BIN / "weftd", "serve", "--port", "0", "--data-dir", tmp_path]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("ready "), log.read_text()
            [nursery] = named(psutil.Process(server.pid), "weft-nursery")
            [trainer], [generator] = (named(nursery, f"weft-{role}") for role in ("trainer", "generator"))
            assert nursery.num_threads() == 1
            assert {nursery, trainer, generator} == set(psutil.Process(server.pid).children(recursive=True))
            [planned] = re.findall(r"^processes and libraries +(\S+) ([MG]iB)", log.read_text(), re.MULTILINE)
            ours = (psutil.Process(server.pid), nursery, trainer, generator)
            assert sum(each.memory_full_info().pss for each in ours) < float(planned[0]) * UNITS[planned[1]]

            trainer.kill()
            until(lambda: named(nursery, "weft-trainer") not in ([], [trainer]))
            family = psutil.Process(server.pid).children(recursive=True)
        finally:
            server.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert len(gone) == 3
    assert not alive


@pytest.fixture
def production(
    tmp_path: Path, postgres: PostgresServer, migrated_postgres: str, redis_url: str
) -> Iterator[Production]:
    with production_of(tmp_path, postgres, migrated_postgres, redis_url) as made:
        yield made


def test_workers_of_replicas_become_their_programs(production: Production) -> None:
    """`weftd worker` starts as a process of its own, which becomes the worker."""
    with ExitStack() as stack:
        workers = {}
        for role in ("trainer", "generator"):
            arguments, environment = production.program("worker", role)
            worker = stack.enter_context(subprocess.Popen([BIN / "weftd", *arguments], env=environment))
            stack.callback(worker.kill)
            workers[role] = worker
        (url,) = production.serve(1)
        service = tinker.ServiceClient(base_url=url, api_key=production.key())
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result(timeout=100)
        assert len(train(run, 2)) == 2
        sampler = run.save_weights_and_get_sampling_client().result(timeout=60)
        sampled = sampler.sample(prompt(), 1, tinker.SamplingParams(max_tokens=4, seed=1)).result(timeout=60)
        assert len(sampled.sequences[0].tokens) <= 4
        for role, worker in workers.items():
            assert psutil.Process(worker.pid).name() == f"weft-{role}"
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
