"""Four tenants train while trainers of one service come, leave and are killed. Every number equals that of undisturbed
runs, to the bit, and the bill is exact."""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.data import ADAM, assert_as_in_other_company, supervised
from tests.e2e.production import Production, production_of, stop
from tests.e2e.test_crashes import fingerprint
from tests.servers import OwnRedis, PostgresServer
from tests.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]
TENANTS = 4
STEPS = 9
PATIENCE_S = 200
#: Operations of two plays: a create, the steps, and a last forward that shows the weights.
OPERATIONS = 2 * TENANTS * (2 + 2 * STEPS)
#: Small passes, so that many are in flight; small replays, so that there are snapshots.
TRAINER = "pass_tokens = 128\nsnapshot_every_tokens = 200\nthreads = 1\n"


class Tenant:
    """An organisation with one run."""

    def __init__(self, url: str, key: str, seed: int) -> None:
        self.seed = seed
        service = tinker.ServiceClient(base_url=url, api_key=key)
        self.run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed).result(timeout=PATIENCE_S)

    def step(self, number: int) -> float:
        data = supervised(sequences=4, length=40, seed=10 * self.seed + number)
        backward, update = self.run.forward_backward(data, "cross_entropy"), self.run.optim_step(ADAM)
        found: float = backward.result(timeout=PATIENCE_S).metrics["loss:sum"]
        update.result(timeout=PATIENCE_S)
        return found


def play(
    url: str, keys: list[str], before: dict[int, Callable[[], None]] | None = None
) -> list[tuple[list[float], np.ndarray[Any, Any]]]:
    """All tenants train at the same time, step by step; `before` is called before a step. Returns the losses, and the
    trained runs' logprobs of other data."""
    with ThreadPoolExecutor(TENANTS) as threads:
        tenants = list(threads.map(Tenant, [url] * TENANTS, keys, range(1, TENANTS + 1)))
        losses: list[list[float]] = []
        for number in range(STEPS):
            happens = (before or {}).get(number)
            disturbance = threading.Thread(target=happens) if happens is not None else None
            if disturbance is not None:
                disturbance.start()
            losses.append(list(threads.map(lambda tenant, n=number: tenant.step(n), tenants)))  # type: ignore[misc]
            if disturbance is not None:
                disturbance.join()
        prints = list(threads.map(lambda tenant: fingerprint(tenant.run), tenants))
    return list(zip(map(list, zip(*losses, strict=True)), prints, strict=True))


def same(found: list[tuple[list[float], np.ndarray[Any, Any]]], calm: list[tuple[list[float], Any]]) -> None:
    for of_one, expected in zip(found, calm, strict=True):
        for computed, wanted in zip(of_one, expected, strict=True):
            assert_as_in_other_company(computed, wanted)


def report(url: str, key: str) -> dict[str, Any]:
    reply = httpx.get(f"{url}/api/v1/weft/stats", headers={"X-API-Key": key}, timeout=30)
    found: dict[str, Any] = reply.json()["trainer"]
    return found


def shared(url: str, key: str, trainers: int) -> None:
    """Wait until there are so many trainers and each has runs."""

    def runs() -> list[int]:
        return [one["runs"] for one in report(url, key)["replicas"].values()]

    until(lambda: len(runs()) == trainers and all(runs()), PATIENCE_S, lambda: report(url, key))


def test_embedded_trainers_share_the_runs_and_may_leave_and_die(
    own_weftd: Callable[..., Weftd], tmp_path: Path
) -> None:
    config = tmp_path / "weft.toml"
    config.write_text(f"[trainer]\n{TRAINER}")
    server = own_weftd("--config", str(config), "--trainers", "2")
    keys = [server.key(f"tenant-{n}") for n in range(TENANTS)]
    calm = play(server.url, keys, {5: lambda: shared(server.url, keys[0], 2)})
    first, second = server.workers("trainer")
    found = play(server.url, keys, {2: first.kill, 5: lambda: second.send_signal(signal.SIGTERM)})
    same(found, calm)
    with sqlite3.connect(f"file:{server.data_dir / 'weft.db'}?mode=ro", uri=True) as db:
        ended = db.execute("select state, count(*) from operations group by state").fetchall()
        assert ended == [("done", OPERATIONS)]
        billed = db.execute("select org_id, count(*), count(distinct operation_id), sum(quantity) from usage_events "
                            "where kind = 'train' group by org_id").fetchall()  # fmt: skip
        suspected = db.execute("select count(*) from operations where attempts > 1").fetchone()
    assert len(billed) == TENANTS
    assert {row[1:3] for row in billed} == {(2 * STEPS, 2 * STEPS)}
    assert suspected == (0,)
    assert "Traceback" not in server.log()


@pytest.fixture
def production(tmp_path: Path, postgres: PostgresServer, migrated_postgres: str) -> Iterator[Production]:
    redis = OwnRedis()
    with production_of(tmp_path, postgres, migrated_postgres, redis.url) as made:
        made.config.write_text(made.config.read_text().replace("[trainer]\nthreads = 1\n", f"[trainer]\n{TRAINER}"))
        yield made
    redis.stop()


def test_on_redis_one_joins_one_leaves_and_one_is_killed(production: Production) -> None:
    trainers = [production.worker("trainer")]
    ((url, _),) = production.serve(1).items()
    keys = [production.key(f"tenant-{n}") for n in range(TENANTS)]

    def join() -> None:
        trainers.append(production.worker("trainer"))
        shared(url, keys[0], 2)

    def swap() -> None:
        trainers.append(production.worker("trainer"))
        assert stop(trainers[0], PATIENCE_S) == 0
        shared(url, keys[0], 2)

    calm = play(url, keys)
    found = play(url, keys, {3: join, 5: swap, 7: lambda: trainers[1].kill()})
    same(found, calm)
    assert production.query("select state, count(*) from operations group by state") == [("done", OPERATIONS)]
    billed = production.query(
        "select org_id, count(*), count(distinct operation_id) from usage_events where kind = 'train' group by org_id"
    )
    assert {row[1:] for row in billed} == {(2 * STEPS, 2 * STEPS)}
    assert report(url, keys[0])["moves"] >= 1
    assert [stop(worker, PATIENCE_S) for worker in trainers[2:]] == [0], production.log()
