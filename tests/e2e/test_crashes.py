"""Any process is killed by kill -9: accepted operations finish as if nothing had happened, and are billed once."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from tests.e2e.conftest import BASE_MODEL, Weftd
from tests.e2e.data import ADAM, prompt, supervised
from tests.waiting import until

pytestmark = pytest.mark.server
Start = Callable[..., Weftd]


def client(server: Weftd) -> Any:
    return tinker.ServiceClient(base_url=server.url, api_key=server.key())


def train(run: Any, steps: int, before_step: Callable[[int], None] = lambda step: None) -> list[float]:
    found = []
    for step in range(steps):
        before_step(step)
        backward, update = run.forward_backward(supervised(seed=step), "cross_entropy"), run.optim_step(ADAM)
        found.append(backward.result(timeout=60).metrics["loss:sum"])
        update.result(timeout=60)
    return found


def fingerprint(run: Any) -> np.ndarray:
    outputs = run.forward(supervised(seed=99), "cross_entropy").result(timeout=60).loss_fn_outputs
    return np.concatenate([o["logprobs"].to_numpy() for o in outputs])


def billed(server: Weftd) -> tuple[int, int]:
    """(finished training operations, their usage events): equal if each is billed once."""
    with sqlite3.connect(f"file:{server.data_dir / 'weft.db'}?mode=ro", uri=True) as db:
        (done,) = db.execute(
            "select count(*) from operations where kind='forward_backward' and state='done'"
        ).fetchone()
        (events,) = db.execute("select count(*) from usage_events where kind='train'").fetchone()
    return done, events


def test_a_killed_trainer_is_replaced_and_the_run_goes_on_bitwise(own_weftd: Start) -> None:
    server = own_weftd()
    service = client(server)
    calm = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    expected = train(calm, 6), fingerprint(calm)

    def kill(step: int) -> None:
        if step in (2, 4):
            server.worker("trainer").kill()

    shaken = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    found = train(shaken, 6, kill), fingerprint(shaken)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    done, events = billed(server)
    assert done == events == 12


def test_snapshots_bound_the_replay_and_change_nothing(own_weftd: Start, tmp_path: Any) -> None:
    config = tmp_path / "weft.toml"
    config.write_text("[trainer]\nsnapshot_every_tokens = 100\n")
    server = own_weftd("--config", str(config))
    service = client(server)
    calm = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    expected = train(calm, 5), fingerprint(calm)
    shaken = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    found = train(shaken, 5, lambda step: server.worker("trainer").kill() if step == 3 else None), fingerprint(shaken)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    with sqlite3.connect(server.data_dir / "weft.db") as db:
        assert all(seq is not None for (seq,) in db.execute("select snapshot_seq from runs"))


def test_a_killed_generator_is_replaced_and_samples_arrive(own_weftd: Start) -> None:
    server = own_weftd()
    sampler = client(server).create_sampling_client(base_model=BASE_MODEL).result()
    params = types.SamplingParams(max_tokens=200, seed=1, stop=[])
    calm = [s.tokens for s in sampler.sample(prompt(), 4, params).result(timeout=60).sequences]
    future = sampler.sample(prompt(), 4, params)
    time.sleep(0.1)
    server.worker("generator").kill()
    assert [s.tokens for s in future.result(timeout=60).sequences] == calm


def test_a_killed_server_finishes_what_it_had_accepted(own_weftd: Start) -> None:
    server = own_weftd()
    service = client(server)
    calm = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    expected = train(calm, 4), fingerprint(calm)
    shaken = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    restarted = threading.Event()

    def kill(step: int) -> None:
        if step == 2:
            server.kill()
            threading.Thread(target=lambda: (server.start(), restarted.set())).start()

    found = train(shaken, 4, kill), fingerprint(shaken)
    assert restarted.wait(30)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    done, events = billed(server)
    assert done == events == 8


def test_accepted_and_then_killed_before_anyone_asked(own_weftd: Start) -> None:
    """A client vanishes together with the server: after the restart its operation is there, and finished."""
    server = own_weftd()
    key = server.key()
    with httpx.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=30) as http:
        session = http.post(
            "/api/v1/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        ).json()
        body = {
            "session_id": session["session_id"],
            "model_seq_id": 0,
            "base_model": BASE_MODEL,
            "lora_config": {"rank": 2},
        }
        made = http.post("/api/v1/create_model", json=body).json()
        run = f"{session['session_id']}:train:0"
        steps = [
            http.post("/api/v1/optim_step", json={"model_id": run, "seq_id": seq, "adam_params": {}}).json()[
                "request_id"
            ]
            for seq in range(1, 30)
        ]
    server.kill()
    server.start()
    with httpx.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=60) as http:
        for request_id in (made["request_id"], steps[0], steps[-1]):
            reply = http.post("/api/v1/retrieve_future", json={"request_id": request_id, "allow_metadata_only": True})
            assert reply.status_code == 200, reply.text
            assert "error" not in json.loads(reply.text)


def test_sigterm_drains_and_a_restart_goes_on(own_weftd: Start) -> None:
    server = own_weftd()
    service = client(server)
    run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    train(run, 2)
    before = fingerprint(run)
    future = run.forward_backward(supervised(seed=7), "cross_entropy")
    assert server.stop() == 0, server.log()
    server.start()
    future.result(timeout=60)
    np.testing.assert_array_equal(fingerprint(run), before)
    children = server.process.pid
    assert children


def test_whenever_it_stops_nothing_is_left_to_be_replayed(own_weftd: Start) -> None:
    """Every run's last state is in a snapshot that the database knows."""
    server = own_weftd()
    service = client(server)
    runs = [service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed).result() for seed in (5, 6)]
    for tries in range(3):
        for run in runs:
            train(run, 1)
        assert server.stop() == 0, server.log()
        with sqlite3.connect(server.data_dir / "weft.db") as db:
            states = db.execute(
                "select runs.id, snapshot_seq, max(seq) from runs join operations on lane = runs.id group by runs.id"
            ).fetchall()
        assert len(states) == 2
        assert all(saved == last for _, saved, last in states), (tries, states)
        server.start()
    assert "Traceback" not in server.log()


def test_polls_are_held_while_no_worker_is_there(own_weftd: Start) -> None:
    """The API answers as soon as the journal is recovered; the workers are held back until then."""
    server = own_weftd()
    key = server.key()
    server.worker("trainer").suspend()  # an operation that is accepted from now on is for the next server
    with httpx.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=30) as http:
        created = http.post("/api/v1/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
        body = {
            "session_id": created.json()["session_id"],
            "model_seq_id": 0,
            "base_model": BASE_MODEL,
            "lora_config": {"rank": 2},
        }
        made = http.post("/api/v1/create_model", json=body).json()["request_id"]
    server.kill()
    (server.data_dir / "weft.toml").write_text("long_poll_s = 0.2\n")
    server.options = ("--config", str(server.data_dir / "weft.toml"))
    ready = threading.Thread(target=server.start)
    ready.start()
    until(lambda: server.process.poll() is None and len(server.nurseries()) == 1)
    [nursery] = server.nurseries()
    nursery.suspend()
    try:
        with httpx.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=60) as http:
            asked: list[httpx.Response] = []

            def answered() -> bool:
                with suppress(httpx.TransportError):
                    asked.append(http.post("/api/v1/retrieve_future", json={"request_id": made}))
                return bool(asked)

            until(answered)
            assert asked[0].status_code == 408
            assert asked[0].json()["queue_state_reason"].startswith("waiting for the trainer, which is starting")
            assert ready.is_alive()  # "ready" is logged once the workers are there
            nursery.resume()
            ready.join(60)
            while (reply := http.post("/api/v1/retrieve_future", json={"request_id": made})).status_code == 408:
                pass
            assert "error" not in reply.json()
    finally:
        with suppress(psutil.NoSuchProcess):
            nursery.resume()
        ready.join(60)


def snapshot_of(server: Weftd, run_id: str) -> str:
    with sqlite3.connect(f"file:{server.data_dir / 'weft.db'}?mode=ro", uri=True) as db:
        return str(db.execute("select snapshot_ref from runs where id = ?", [run_id]).fetchone()[0])


def test_trainers_that_do_not_live_long_get_a_large_operation_done(own_weftd: Start) -> None:
    """The trainer is killed whenever the operation has advanced, more often than an operation may fail."""
    server = own_weftd()
    service = client(server)
    data = supervised(sequences=40, length=240)  # some 10,000 tokens in one operation
    calm = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    expected = calm.forward_backward(data, "cross_entropy").result(timeout=250)
    calm.optim_step(ADAM).result(timeout=60)
    shaken = service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result()
    with ThreadPoolExecutor() as pool:
        future = pool.submit(lambda: shaken.forward_backward(data, "cross_entropy").result(timeout=250))
        time.sleep(1.0)
        for _ in range(5):
            before = snapshot_of(server, shaken.model_id)
            while not (working := server.workers("trainer")):
                time.sleep(0.05)
            working[0].kill()
            while snapshot_of(server, shaken.model_id) == before and not future.done():
                time.sleep(0.05)
        found = future.result()
    assert found.metrics == expected.metrics
    shaken.optim_step(ADAM).result(timeout=60)
    np.testing.assert_array_equal(fingerprint(shaken), fingerprint(calm))
