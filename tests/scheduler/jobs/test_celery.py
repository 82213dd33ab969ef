"""A real Celery worker and beat on a real Redis whose link dies: top-ups are credited all the same, once, only later.

Worker and beat are never restarted. The link fails in the worst known way: bytes vanish while the connections stay
open, so that neither side is told."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import redis

from billing.payments import inbox
from scheduler.jobs.running import ask
from store.database.db import Database
from store.tables import JobRun
from tests.billing.payments.kit import Payments
from tests.fakestripe import FakeStripe, fake_stripe
from tests.fakestripe.app import Front
from tests.fakestripe.server import WEBHOOK_SECRET
from tests.scheduler.jobs.proxy import Proxy, proxy
from tests.servers import OwnRedis

BLACK_HOLE_S = 40.0
#: Once the link works again. Measured: a few seconds, up to 5 of which are the beat's; the machine may be busy.
RECOVERY_S = 120.0


def _wait(condition: Callable[[], bool], seconds: float, failure: str) -> float:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError(failure)
        time.sleep(0.1)
    return time.monotonic() - began


@contextmanager
def _command(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "api.cli", "jobs", *arguments, "--config", str(folder / "weft.toml")]
    with (folder / f"{arguments[0]}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Office:
    """Worker and beat behind the proxy, and top-ups for them to credit."""

    def __init__(self, payments: Payments, org_id: str, server: OwnRedis, link: Proxy) -> None:
        self.payments = payments
        self.org_id = org_id
        self.server = server
        self.link = link
        self.topups = 0

    def topup(self) -> None:
        """Do what the webhook route does with a payment that Stripe reports."""
        stripe = self.payments.fake.stripe
        stripe.now = time.time()
        payment = stripe.add(
            "pi",
            "payment_intent",
            amount=100,
            amount_received=100,
            currency="usd",
            customer=self.payments.customer(self.org_id),
            metadata={"weft_kind": "topup", "weft_org": self.org_id},
            status="succeeded",
            last_payment_error=None,
        )
        event, now = stripe.tell("payment_intent.succeeded", payment), datetime.now(UTC)

        def keep(session: object) -> None:
            inbox.keep(session, event, now)  # type: ignore[arg-type]
            ask(session, "process_webhooks", now)  # type: ignore[arg-type]

        self.payments.database.write_now(keep)
        self.topups += 1

    def credited(self) -> int:
        return len(self.payments.ledger(self.org_id))

    def wait_credited(self) -> float:
        return _wait(lambda: self.credited() == self.topups, RECOVERY_S, f"{self.credited()} of {self.topups} credited")


@pytest.fixture
def office(database: Database, tmp_path: Path) -> Iterator[Office]:
    with ExitStack() as stack:
        fake: FakeStripe = stack.enter_context(fake_stripe()).reset(datetime.now(UTC))
        server = OwnRedis()
        stack.callback(server.stop)
        link = stack.enter_context(proxy(server.port))
        (tmp_path / "weft.toml").write_text(
            f'data_dir = "."\n[jobs]\ndriver = "celery"\nredis_url = "redis://127.0.0.1:{link.port}/0"\n'
            f'[payments]\nenabled = true\nsecret_key = "{Front.key}"\nwebhook_secrets = ["{WEBHOOK_SECRET}"]\n'
            f'api_base = "{fake.url}"\n'
        )
        payments = Payments(database, fake, tmp_path)
        org_id = payments.organisation("prepaid")
        processes = [
            stack.enter_context(_command(tmp_path, "worker", "--concurrency", "1")),
            stack.enter_context(_command(tmp_path, "beat")),
        ]
        yield Office(payments, org_id, server, link)
        assert [process.poll() for process in processes] == [None, None]  # the same two, still there


@pytest.mark.timeout(600)
@pytest.mark.long
def test_money_is_late_and_never_lost(office: Office) -> None:
    office.topup()
    office.wait_credited()

    office.link.swallowing = True
    deadline = time.monotonic() + BLACK_HOLE_S
    while time.monotonic() < deadline:
        office.topup()
        time.sleep(BLACK_HOLE_S / 4)
    assert office.link.swallowed_bytes > 0
    office.link.swallowing = False
    recovery_s = office.wait_credited()
    print(f"after {BLACK_HOLE_S:.0f} s without a link: all credited {recovery_s:.1f} s later")

    office.topup()
    with redis.Redis(port=office.server.port) as client:
        client.flushall()
    office.wait_credited()

    office.server.stop()
    office.topup()
    time.sleep(2)
    office.server.start()
    recovery_s = office.wait_credited()
    print(f"after a restart of Redis: {recovery_s:.1f} s")

    with office.payments.database.read() as session:  # the heartbeat, which an operator would look at
        heartbeat = session.get_one(JobRun, "heartbeat")
    assert heartbeat.succeeded_at is not None
    assert office.payments.ledger(office.org_id) == [("topup", 10**9)] * office.topups
