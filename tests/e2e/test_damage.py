"""Damaged or missing files: the operator and the client are told which, and nobody gets half of anything. A real server
and the official SDK, while the test harms the files."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from tests.e2e.conftest import BASE_MODEL, Weftd, weftd_command
from tests.e2e.data import ADAM, supervised

pytestmark = pytest.mark.server
Start = Callable[..., Weftd]


def train(run: Any, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        backward, step = run.forward_backward(supervised(seed=seed), "cross_entropy"), run.optim_step(ADAM)
        losses.append(backward.result(timeout=60).metrics["loss:sum"])
        step.result(timeout=60)
    return losses


def cut(path: Path, left: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * left)])


def rows(server: Weftd, query: str, *values: str) -> list[Any]:
    with sqlite3.connect(f"file:{server.data_dir / 'weft.db'}?mode=ro", uri=True) as db:
        return db.execute(query, values).fetchall()


def start_refused(server: Weftd) -> str:
    done = weftd_command("serve", "--port", "0", "--data-dir", server.data_dir)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    return line


def trained_run(server: Weftd) -> Any:
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key())
    run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    train(run, range(2))
    run.save_state("good").result(timeout=60)
    train(run, range(2, 4))
    return run


@pytest.fixture
def trained(own_weftd: Start) -> tuple[Weftd, Any]:
    server = own_weftd()
    return server, trained_run(server)


@dataclass(frozen=True)
class Harmed:
    """A server that was stopped, and started again after one thing of each run was harmed. `refusal`: what it said
    while its database was gone; `result`: the operation whose result was cut."""

    server: Weftd
    cut_snapshot: Any
    lost_snapshot: Any
    refusal: str
    result: str


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harmed]:
    server = Weftd(tmp_path_factory.mktemp("harmed")).start()
    cut_snapshot, lost_snapshot, cut_result = (trained_run(server) for _ in range(3))
    cut_result.forward_backward(supervised(60), "cross_entropy").result(timeout=60)  # too large a result for a row
    server.stop()
    (server.data_dir / "weft.db").rename(server.data_dir / "elsewhere.db")
    refusal = start_refused(server)
    (server.data_dir / "elsewhere.db").rename(server.data_dir / "weft.db")
    blobs, snapshot = server.data_dir / "blobs", "select snapshot_ref from runs where id = ?"
    cut(blobs / rows(server, snapshot, cut_snapshot.model_id)[0][0] / "extra.safetensors")
    (blobs / rows(server, snapshot, lost_snapshot.model_id)[0][0]).rename(server.data_dir / "elsewhere")
    query = "select id, result_ref from operations where result_ref is not null and lane = ?"
    ((result, ref),) = rows(server, query, cut_result.model_id)
    cut(blobs / ref)
    yield Harmed(server.start(), cut_snapshot, lost_snapshot, refusal, result)
    server.stop()


def broken_because(run: Any) -> str:
    with pytest.raises(tinker.RequestFailedError) as found:
        run.forward_backward(supervised(seed=9), "cross_entropy").result(timeout=60)
    words = str(found.value)
    assert f"tinker://{run.model_id}/weights/good" in words
    return words


def test_a_body_cut_short_breaks_the_run_and_says_so(trained: tuple[Weftd, Any]) -> None:
    """Without the body the rebuilt run would go on with other weights."""
    server, run = trained
    (ref,) = rows(server, "select body_ref from operations where kind = 'forward_backward' order by seq limit 1")[0]
    cut(server.data_dir / "blobs" / ref)
    server.worker("trainer").kill()
    words = broken_because(run)
    assert "cannot be rebuilt as it was" in words
    assert "damaged" in words
    assert "cannot be rebuilt as it was" in broken_because(run)  # and at once
    server.stop()
    server.start()
    assert "cannot be rebuilt as it was" in broken_because(run)
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key())
    again = service.create_training_client_from_state_with_optimizer(f"tinker://{run.model_id}/weights/good").result()
    train(again, range(2, 4))


def test_a_snapshot_cut_short_breaks_the_run_and_says_so(harmed: Harmed) -> None:
    words = broken_because(harmed.cut_snapshot)
    assert "its snapshot cannot be repeated: the checkpoint is damaged on the server's disk" in words


def test_a_snapshot_that_is_gone_is_named_at_the_start(harmed: Harmed) -> None:
    assert "its snapshot after operation" in harmed.server.log()
    assert "is missing" in broken_because(harmed.lost_snapshot)


def test_a_result_cut_short_is_given_to_nobody(harmed: Harmed) -> None:
    server = harmed.server
    headers = {"X-API-Key": server.key()}
    answer = httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": harmed.result}, headers=headers)
    assert answer.status_code == 410
    assert "damaged on the server's disk" in answer.json()["detail"]


def test_a_checkpoint_cut_short_is_neither_loaded_nor_handed_out(harmed: Harmed) -> None:
    server, run = harmed.server, trained_run(harmed.server)
    ((ref,),) = rows(server, "select ref from checkpoints where run_id = ?", run.model_id)
    cut(server.data_dir / "blobs" / ref / "adapter.safetensors", 0.9)
    path = f"tinker://{run.model_id}/weights/good"
    with pytest.raises(tinker.RequestFailedError, match="damaged on the server's disk"):
        run.load_state(path).result(timeout=60)
    headers = {"X-API-Key": server.key()}
    url = f"{server.url}/api/v1/training_runs/{run.model_id}/checkpoints/weights/good/archive"
    answer = httpx.get(url, headers=headers)
    assert answer.status_code == 410, answer.text
    assert "damaged" in answer.json()["detail"]
    train(run, range(4, 5))  # the run itself is unharmed


def test_a_database_that_is_gone_is_not_begun_anew(harmed: Harmed) -> None:
    assert "weft.db is missing" in harmed.refusal


def test_a_log_cut_in_half_is_not_served(trained: tuple[Weftd, Any]) -> None:
    server, run = trained
    server.kill()
    cut(server.data_dir / "weft.db-wal")
    line = start_refused(server)
    assert "has lost commits" in line
    assert "weftd repair" in line
    done = weftd_command("repair", "--data-dir", server.data_dir)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() in ([], [run.model_id])
    server.start()
