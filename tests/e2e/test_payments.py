"""The official SDK runs out of money and waits at 402; a webhook reports a card payment, and its job goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from tests.e2e.conftest import BASE_MODEL, Weftd, weftd_command
from tests.e2e.data import ADAM, supervised
from tests.fakestripe import FakeStripe, fake_stripe
from tests.fakestripe.app import Front
from tests.fakestripe.server import WEBHOOK_SECRET
from tests.fakestripe.webhooks import signed

pytestmark = pytest.mark.server


@pytest.fixture
def fake() -> Iterator[FakeStripe]:
    with fake_stripe() as server:
        yield server.reset(datetime.now(UTC))


def test_a_job_that_waits_for_money_goes_on_when_it_is_paid(
    own_weftd: Callable[..., Weftd], fake: FakeStripe, tmp_path: Path
) -> None:
    config = tmp_path / "weft.toml"
    config.write_text(
        f'[billing]\nmode = "prepaid"\n[payments]\nenabled = true\nsecret_key = "{Front.key}"\n'
        f'webhook_secrets = ["{WEBHOOK_SECRET}"]\napi_base = "{fake.url}"\n'
    )
    server = own_weftd("--config", str(config))
    headers = {"x-api-key": server.key()}
    granted_nusd = 1000  # pays for no work, but a run needs some balance to be created
    grant = ["credit", "grant", "--org", "acme", "--usd", f"{granted_nusd / 10**9:.9f}"]
    assert weftd_command(*grant, "--data-dir", server.data_dir).returncode == 0
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key())
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    waiting: list[Any] = [run.forward_backward(supervised(seed=seed), "cross_entropy") for seed in range(2)]
    waiting.append(run.optim_step(ADAM))
    with pytest.raises(TimeoutError):
        waiting[0].result(timeout=7)  # longer than the SDK's pause of 5 s, so the request was refused at least once

    def usage() -> Any:
        return httpx.get(f"{server.url}/api/v1/weft/usage", headers=headers, timeout=30).json()

    assert usage()["rows"] == []
    address = f"{server.url}/api/v1/weft/billing/topups"
    topup = httpx.post(address, headers=headers, json={"amount_usd": "5"}, timeout=30).json()
    fake.stripe.finish_checkout(topup["id"])
    for event in [*fake.stripe.events, *fake.stripe.events]:
        body, signature = signed(event, WEBHOOK_SECRET)
        webhook = f"{server.url}/api/v1/stripe/webhook"
        assert httpx.post(webhook, content=body, headers={"stripe-signature": signature}, timeout=30).status_code == 200
    began = time.monotonic()
    for future in waiting:
        future.result(timeout=120)
    print(f"went on {time.monotonic() - began:.1f} s after the webhook")
    rows = usage()["rows"]
    tokens = 2 * sum(datum.model_input.length for datum in supervised())
    assert [(row["kind"], row["quantity"] if "quantity" in row else row["tokens"]) for row in rows] == [
        ("train", tokens)
    ]
    balance = httpx.get(f"{server.url}/api/v1/weft/balance", headers=headers, timeout=30).json()
    assert balance["balance_nusd"] == granted_nusd + 5 * 10**9 - usage()["total_nusd"]
    assert balance["held_nusd"] == 0
