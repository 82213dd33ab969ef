"""Money, by the unmodified official SDK and command line: 402 pauses a job until a top-up, and all bills agree."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tinker import types
from weft.cli import main

from tests.e2e.conftest import BASE_MODEL, Weftd, tinker_command, weftd_command
from tests.e2e.data import ADAM, prompt, supervised

pytestmark = pytest.mark.server

PREPAID = '[billing]\nmode = "prepaid"\n'


@pytest.fixture
def prepaid(own_weftd: Callable[..., Weftd], tmp_path: Path) -> Weftd:
    """A server on which everything has a price."""
    config = tmp_path / "weft.toml"
    config.write_text(PREPAID)
    return own_weftd("--config", str(config))


def operator(server: Weftd, *command: str) -> str:
    done = weftd_command(*command, "--data-dir", server.data_dir)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(server: Weftd, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{server.data_dir}/weft.db?mode=ro", uri=True) as database:
        return database.execute(query).fetchall()


def ask(server: Weftd, path: str) -> Any:
    reply = httpx.get(f"{server.url}/api/v1/{path}", headers={"X-API-Key": server.key()}, timeout=60)
    reply.raise_for_status()
    return reply.json()


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    return thread, found


def test_a_job_that_is_out_of_money_goes_on_after_a_top_up(prepaid: Weftd) -> None:
    import tinker

    data = supervised()
    tokens = sum(datum.model_input.length for datum in data)
    step_nusd = tokens * 400
    key = prepaid.key()
    operator(prepaid, "credit", "grant", "--org", "acme", "--usd", f"{step_nusd / 10**9:.9f}")
    service = tinker.ServiceClient(base_url=prepaid.url, api_key=key)
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result()  # is free, but needs a balance

    def train() -> list[float]:
        losses = []
        for _ in range(3):
            backward, update = run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)
            losses.append(backward.result().metrics["loss:sum"])
            update.result()
        return losses

    thread, losses = in_thread(train)
    deadline = time.monotonic() + 60
    while rows(prepaid, "select count(*) from usage_events") != [(1,)] and time.monotonic() < deadline:
        time.sleep(0.1)
    thread.join(2)
    assert thread.is_alive()  # the client waits, and no error tells its user
    assert ask(prepaid, "weft/balance")["available_nusd"] == 0
    operator(prepaid, "credit", "grant", "--org", "acme", "--usd", "1")
    thread.join(60)
    (found,) = losses
    assert found[2] < found[0]
    kinds = "select o.seq, u.amount_nusd from operations o join usage_events u on u.operation_id = o.id order by o.seq"
    assert [amount for _, amount in rows(prepaid, kinds)] == [step_nusd] * 3
    sampler = run.save_weights_and_get_sampling_client().result()
    reply = sampler.sample(prompt(), 2, types.SamplingParams(max_tokens=5, stop=[])).result()
    assert len(reply.sequences) == 2
    balance = ask(prepaid, "weft/balance")
    assert balance["held_nusd"] == 0
    assert balance["balance_nusd"] == step_nusd + 10**9 - balance["spent_nusd"]
    assert operator(prepaid, "billing", "reconcile") == "the books agree\n"


def test_a_refusal_names_the_limit_and_takes_no_number(prepaid: Weftd) -> None:
    headers = {"X-API-Key": prepaid.key()}

    def post(path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{prepaid.url}/api/v1/{path}", headers=headers, json=body, timeout=60)

    session = post("create_session", {"tags": [], "sdk_version": "1"}).json()["session_id"]
    wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    body = {
        "sampling_session_id": post("create_sampling_session", wanted).json()["sampling_session_id"],
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 4},
        "num_samples": 2,
    }
    reply = post("asample", body)
    assert reply.status_code == 402
    told = reply.json()
    assert told["code"] == "out_of_money"
    assert (told["available_nusd"], told["held_nusd"]) == (0, 0)
    assert told["needed_nusd"] == 3 * 130 + 3 * 26 + 8 * 400 + 1
    assert "the prepaid balance" in told["detail"]
    assert rows(prepaid, "select count(*) from operations where kind = 'sample'") == [(0,)]
    assert [path for path in (prepaid.data_dir / "blobs").glob("ops/*/*") if path.is_file()] == []
    operator(prepaid, "credit", "grant", "--org", "acme", "--usd", "0.5")
    operator(prepaid, "budget", "set", "--org", "acme", "--usd", "0.000001")
    reply = post("asample", body)
    assert reply.status_code == 402
    assert "the budget of the organisation in 20" in reply.json()["detail"]
    operator(prepaid, "budget", "set", "--org", "acme", "--usd", "1")
    assert post("asample", body).status_code == 200


def test_admin_client_and_command_line_agree_with_the_ledger(own_weftd: Callable[..., Weftd], tmp_path: Path) -> None:
    """A run trains, samples and saves; then every way to ask for its cost gives the same nano-dollars."""
    import tinker

    server = own_weftd()
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key())
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    run.forward_backward(supervised(), "cross_entropy").result()
    path = run.save_weights_for_sampler("one").result().path
    sampler = service.create_sampling_client(model_path=path)
    sampler.sample(prompt(), 3, types.SamplingParams(max_tokens=5, stop=[])).result()
    stored = meter_storage(server)
    assert stored["events"] >= 2
    (billed,) = rows(server, "select -sum(amount_nusd) from ledger_entries where type = 'usage'")[0]
    assert {kind for (kind,) in rows(server, "select kind from usage_events")} == {
        "train",
        "prefill",
        "cached_prefill",
        "sample",
        "storage",
    }

    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, end = now - timedelta(hours=5), now + timedelta(hours=1)
    admin = tinker.AdminClient(base_url=server.url, api_key=server.key())
    usage = admin.get_billing_usage(starting_on=start, ending_before=end).result()
    assert sum(round((event.estimated_cost_usd or 0) * 10**9) for event in usage.data) == billed
    (storage,) = [event for event in usage.data if event.event_info.type == "storage"][:1]
    assert storage.effective_rate_usd_per_gigabyte_month == 0.1
    current = admin.get_current_checkpoint_storage_usage().result()
    (size,) = rows(server, "select sum(size_bytes) from checkpoints")[0]
    assert (sum(item.size_bytes for item in current.data), current.effective_rate_usd_per_gigabyte_month) == (size, 0.1)

    stamps = [f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in (start, end)]
    file = tmp_path / "usage.csv"
    command_line(server, "billing", "usage", *stamps, "--csv", str(file))
    lines = list(csv.DictReader(io.StringIO(file.read_text())))
    assert sum(round(float(line["estimated_cost_usd"] or 0) * 10**9) for line in lines) == billed
    assert str(size) in command_line(server, "-f", "json", "billing", "checkpoint-storage")

    settings = {"WEFT_API_KEY": server.key(), "WEFT_BASE_URL": server.url}
    cost = CliRunner().invoke(main, ["cost", run.model_id, "--json"], env=settings, catch_exceptions=False)
    assert json.loads(cost.stdout)["total_nusd"] == billed


def meter_storage(server: Weftd) -> dict[str, int]:
    """The hourly metering of storage, as if the checkpoint had been stored for three hours."""
    from billing.metering.storage import meter
    from billing.prices import load_prices
    from store.database.db import Database

    database = Database(f"sqlite:///{server.data_dir}/weft.db")
    try:
        database.write_now(lambda session: age_spans(session))
        return meter(database, load_prices(), datetime.now(UTC))
    finally:
        database.close()


def age_spans(session: Any) -> None:
    from sqlalchemy import update

    from store.tables import StorageSpan

    before = datetime.now(UTC) - timedelta(hours=3)
    session.execute(update(StorageSpan).values(started_at=before, metered_until=before, size_bytes=10**9))


def command_line(server: Weftd, *command: str) -> str:
    run = tinker_command(server, *command)
    assert run.returncode == 0, run.stderr
    return run.stdout
