"""The console's pages under row-level security: each works, so none of them reads what its organisation may not see."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.testclient import TestClient

from billing.prices import load_prices
from store.db import Database
from tests.console.conftest import Console, application
from tests.console.seed import seed
from tests.tenancy.conftest import routes_of


def test_every_page(tmp_path: Path, postgres_database: Database) -> None:
    made = postgres_database.write_now(lambda session: seed(session, load_prices(), days=2))
    app: FastAPI = application(tmp_path, postgres_database)
    with TestClient(app) as http:
        console = Console(app, postgres_database, made, http)
        assert console.sign_in().status_code == 303
        pages = [r.path for r in routes_of(app) if r.method == "GET" and r.path.startswith("/console/")]
        wrong = []
        for page in pages:
            if "{" in page or page.endswith("/ownership"):  # the latter is the operator's
                continue
            reply = http.get(page, follow_redirects=False)
            if reply.status_code != 200 and not page.endswith("/login"):
                wrong.append((page, reply.status_code, reply.text[:200]))
        assert wrong == []
        assert len(pages) > 10
