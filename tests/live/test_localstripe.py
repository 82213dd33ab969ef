"""Against localstripe, an independent imitation of Stripe. Of what we use it has only customers and signed webhooks.
Runs only if LOCALSTRIPE names its program (it is GPL, and installed in an environment of its own), and never in CI."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from pydantic import SecretStr

from billing.payments import inbox
from billing.payments.client import stripe_client
from store.settings import PaymentsSettings
from tests.servers import free_port

PROGRAM = os.environ.get("LOCALSTRIPE", "")
pytestmark = [pytest.mark.localstripe, pytest.mark.skipif(not PROGRAM, reason="LOCALSTRIPE names no program")]
SECRET = "whsec_local"
KEY = "sk_test_12345"


@pytest.fixture
def url() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([PROGRAM, "--port", str(port), "--from-scratch"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_customers_and_signed_webhooks(url: str) -> None:
    heard: list[tuple[bytes, str]] = []
    some = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            heard.append((body, self.headers["stripe-signature"]))
            self.send_response(200)
            self.end_headers()
            some.set()

        def log_message(self, *_arguments: object) -> None:
            pass

    listener = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    hook = {"url": f"http://127.0.0.1:{listener.server_port}/", "secret": SECRET}
    assert httpx.post(f"{url}/_config/webhooks/weft", json=hook, auth=(KEY, "")).status_code == 200
    settings = PaymentsSettings(
        enabled=True, secret_key=SecretStr(KEY), webhook_secrets=[SecretStr(SECRET)], api_base=url
    )
    made = stripe_client(settings).v1.customers.create({"name": "acme", "metadata": {"weft_org": "acme"}})
    assert some.wait(30)
    listener.shutdown()
    body, signature = heard[0]
    event = inbox.verify(body, signature, settings.webhook_secrets)
    assert (event["type"], event["data"]["object"]["id"]) == ("customer.created", made.id)
    with pytest.raises(inbox.BadWebhook):
        inbox.verify(body + b" ", signature, settings.webhook_secrets)
