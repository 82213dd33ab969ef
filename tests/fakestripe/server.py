"""The fake on a free loopback port, in a thread of the test's process, so that tests can look into it and change it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import uvicorn
from pydantic import SecretStr

from store.settings import PaymentsSettings
from tests.fakestripe.app import Front
from tests.fakestripe.state import Stripe
from tests.servers import free_port

WEBHOOK_SECRET = "whsec_" + "0" * 32


class FakeStripe:
    def __init__(self, front: Front, url: str) -> None:
        self.front = front
        self.url = url

    @property
    def stripe(self) -> Stripe:
        return self.front.stripe

    def reset(self, now: datetime) -> FakeStripe:
        """Start again with an empty account that has Weft's meters."""
        self.front.start_with(Stripe(now.timestamp()))
        for meter in ("train", "prefill", "sample", "storage"):
            name = f"weft_{meter}"
            self.stripe.add("mtr", "billing.meter", event_name=name, display_name=name, status="active")
        return self

    def settings(self) -> PaymentsSettings:
        return PaymentsSettings(
            enabled=True,
            secret_key=SecretStr(Front.key),
            webhook_secrets=[SecretStr(WEBHOOK_SECRET)],
            api_base=self.url,
        )


@contextmanager
def fake_stripe() -> Iterator[FakeStripe]:
    front, port = Front(Stripe(0.0)), free_port()
    config = uvicorn.Config(front.app(), host="127.0.0.1", port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    try:
        yield FakeStripe(front, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(10)
