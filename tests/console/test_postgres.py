"""Every page on PostgreSQL, where row-level security holds in addition to the pages' own checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from billing.prices import load_prices
from store.database.db import Database
from tests.console.conftest import Console, application
from tests.console.seed import seed


@pytest.fixture
def console(tmp_path: Path, postgres_database: Database) -> Iterator[Console]:
    made = postgres_database.write_now(lambda session: seed(session, load_prices(), days=3))
    app = application(tmp_path, postgres_database)
    with TestClient(app) as http:
        yield Console(app, postgres_database, made, http)


def test_every_page(console: Console) -> None:
    console.sign_in()
    run = console.made.runs[0]
    pages = ["/", "/usage?by=key", "/usage.csv", "/runs?search=5e55", f"/runs/{run}", f"/runs/{run}/live"]
    pages += ["/checkpoints?sort=expiring", "/keys", "/members", "/budgets", "/billing", "/audit", "/queues"]
    for path in pages:
        assert "rival" not in console.get(path).lower()
    assert "Others" in console.get("/queues")
    secret = console.press("/keys", name="on postgres", scopes=["train"])
    assert "tml-" in secret.text
    console.press("/budgets", of="org", limit_usd="10")
    console.press("/checkpoints/ttl", path=f"tinker://{run}/weights/step-200", days=1)
    body = {"points": [{"name": "reward", "step": 1, "value": 0.5}, {"name": "more", "step": 1, "value": 1}]}
    headers = {"x-api-key": console.made.keys["owner"]}
    assert console.http.post(f"/api/v1/weft/runs/{run}/metrics", json=body, headers=headers).json() == {"new": 1}
    total = console.api("weft/usage")["total_usd"]
    assert f'value="{total}"' in console.get("/usage")
    console.press("/logout", status=204)
