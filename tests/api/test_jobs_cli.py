"""`weftd jobs` and `weftd payments`, in this process."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from api.cli import weftd
from api.server.serve import CannotServe, serve
from scheduler.jobs.catalogue import JOBS
from store.settings import PaymentsSettings, Settings
from tests.fakestripe import FakeStripe, fake_stripe
from tests.fakestripe.app import Front
from tests.fakestripe.server import WEBHOOK_SECRET
from tests.servers import OwnStore


@pytest.fixture
def fake() -> Iterator[FakeStripe]:
    with fake_stripe() as server:
        yield server.reset(datetime.now(UTC))


def _weftd(folder: Path, *arguments: str, config: str = "") -> Result:
    file = folder / "weft.toml"
    file.write_text(f'data_dir = "."\n{config}')
    return CliRunner().invoke(weftd, [*arguments, "--config", str(file)])


def _listed(result: Result) -> dict[str, list[str]]:
    return {line.split("\t")[0]: line.split("\t")[1:] for line in result.stdout.splitlines()}


@pytest.mark.parametrize("command", ["worker", "beat"])
def test_without_a_redis_there_is_no_carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """The command used the Redis on this machine, whoever owned that."""
    for start in ("worker_main", "Beat"):
        monkeypatch.setattr(f"celery.Celery.{start}", lambda *_, **__: pytest.fail("it starts"))
    assert _weftd(tmp_path, "migrate").exit_code == 0
    result = _weftd(tmp_path, "jobs", command)
    says = "weftd: there is no Redis to carry jobs: set redis_url, or jobs.redis_url (docs/jobs.md)\n"
    assert (result.exit_code, result.stderr) == (2, says)


#: What Celery does in the process where it starts: it forks, and tasks run in the child.
FORKS = """
import os, signal, sys
from celery import Celery
from api.cli import main

def worker_main(app, arguments):
    app.conf.task_always_eager = True
    if os.fork() == 0:
        signal.alarm(20)
        app.tasks["weft.look"]()
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))

Celery.worker_main = worker_main
sys.argv[1:] = ["jobs", "worker", "--config", sys.argv[1]]
main()
"""


def test_jobs_that_celery_carries_reach_the_object_store(object_store: OwnStore, tmp_path: Path) -> None:
    """If the store's client had been used before the fork, jobs waited for ever."""
    url = f"{object_store.url}/{uuid.uuid4().hex}"
    config = f'blob_url = "{url}"\nredis_url = "redis://127.0.0.1:1/0"\n'
    assert _weftd(tmp_path, "migrate", config=config).exit_code == 0
    command = [sys.executable, "-c", FORKS, str(tmp_path / "weft.toml")]
    worker = subprocess.run(command, env=os.environ | object_store.environment, capture_output=True, text=True)
    assert worker.returncode == 0, worker.stderr
    assert _listed(_weftd(tmp_path, "jobs", "list", config=config))["heartbeat"][1] != "never"


def test_a_job_is_run_and_listed(tmp_path: Path) -> None:
    assert _weftd(tmp_path, "migrate").exit_code == 0
    before = _listed(_weftd(tmp_path, "jobs", "list"))
    assert set(before) == set(JOBS)
    assert before["reconcile"] == ["every 86400s", "never", "-", "overdue", "{}"]
    result = _weftd(tmp_path, "jobs", "run", "reconcile")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"differ": 0, "drift_nusd": 0})
    after = _listed(_weftd(tmp_path, "jobs", "list"))
    assert after["reconcile"][3:] == ["ok", '{"differ": 0, "drift_nusd": 0}']


def test_a_probe_fails_until_every_job_has_run(tmp_path: Path) -> None:
    assert _weftd(tmp_path, "migrate").exit_code == 0
    assert _weftd(tmp_path, "jobs", "list", "--check").exit_code == 1
    for name in JOBS:
        assert _weftd(tmp_path, "jobs", "run", name).exit_code == 0
    assert _weftd(tmp_path, "jobs", "list", "--check").exit_code == 0


def test_who_is_made_postpaid_is_a_customer_or_stays_what_he_was(tmp_path: Path, fake: FakeStripe) -> None:
    price = fake.stripe.add("price", "price", lookup_key="weft_train")["id"]

    def mode(*, key: str, enabled: str = "true") -> Result:
        config = f'[payments]\nenabled = {enabled}\nsecret_key = "{key}"\napi_base = "{fake.url}"\n'
        config += f'webhook_secrets = ["{WEBHOOK_SECRET}"]\nprice_ids = ["{price}"]\n'
        return _weftd(tmp_path, "billing", "mode", "--org", "acme", "postpaid", "--overdraft", "5", config=config)

    assert _weftd(tmp_path, "key", "create", "--org", "acme").exit_code == 0
    refused = mode(key="sk_test_wrong")
    assert refused.exit_code == 2
    assert "its mode is what it was" in refused.stderr
    with sqlite3.connect(tmp_path / "weft.db") as database:
        assert database.execute("SELECT 1 FROM wallets WHERE mode = 'postpaid'").fetchall() == []
    assert fake.stripe.all("customer") == []
    for _ in range(2):
        assert mode(key=Front.key).output.startswith("acme\tpostpaid")
    (customer,), (subscription,) = fake.stripe.all("customer"), fake.stripe.all("subscription")
    assert customer["name"] == "acme"
    assert subscription["customer"] == customer["id"]
    assert mode(key="sk_test_wrong", enabled="false").exit_code == 0  # nobody is asked


def test_an_unknown_job_is_refused(tmp_path: Path) -> None:
    result = _weftd(tmp_path, "jobs", "run", "nap")
    assert result.exit_code == 2
    assert "no job 'nap': there are" in result.stderr


def test_setup_prints_the_line_for_the_settings(tmp_path: Path, fake: FakeStripe) -> None:
    config = (
        f'[payments]\nenabled = true\nsecret_key = "{Front.key}"\nwebhook_secrets = ["{WEBHOOK_SECRET}"]\n'
        f'api_base = "{fake.url}"\n'
    )
    result = _weftd(tmp_path, "payments", "setup", config=config)
    assert (result.exit_code, result.stdout[:14]) == (0, 'price_ids = ["')
    assert _weftd(tmp_path, "payments", "setup", config=config + result.stdout).stdout == result.stdout


def test_payments_without_a_key_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_STRIPE_SECRET_KEY", raising=False)
    settings: Any = Settings(data_dir=tmp_path, payments=PaymentsSettings(enabled=True))
    with pytest.raises(CannotServe, match="needs a Stripe key"):
        serve(settings)
