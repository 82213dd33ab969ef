"""Every page of the console works under row-level security: none of them reads another organisation's rows."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.testclient import TestClient

from billing.prices import load_prices
from store.database.db import Database
from tests.console.conftest import SAME_SITE, Console, application
from tests.console.provider import provider_process
from tests.console.seed import seed
from tests.console.sso import at_provider, begin, come_back, person, sign_in, take_provider
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
            if "{" in page or page.endswith(("/ownership", "/sso/callback")):  # for operators, and for providers
                continue
            reply = http.get(page, follow_redirects=False)
            if reply.status_code != 200 and not page.endswith("/login"):
                wrong.append((page, reply.status_code, reply.text[:200]))
        assert wrong == []
        assert len(pages) > 10


def test_an_invitation_by_the_provider(tmp_path: Path, postgres_database: Database) -> None:
    """The two ways to sign in that do not know the organisation until they have found it."""
    made = postgres_database.write_now(lambda session: seed(session, load_prices(), days=1))
    app: FastAPI = application(tmp_path, postgres_database)
    with provider_process() as issuer, TestClient(app) as http:
        console = Console(app, postgres_database, made, http)
        take_provider(console, issuer)
        headers = {"x-api-key": made.keys["owner"]}
        invited = http.post("/api/v1/weft/invitations", json={"role": "viewer"}, headers=headers).json()
        person(issuer, "guest", groups=["weft-acme-admins"])
        secret = invited["link"].rpartition("/")[2]
        assert "Acme Research" in http.get(f"/console/join/{secret}").text
        person(issuer, "other")
        assert come_back(console, at_provider(begin(console, invitation=secret), "other")).status_code == 303
        assert "other@corp.example" in console.get("/runs")
        assert sign_in(console, "guest").status_code == 303
        console.get("/members")
        local = http.post("/api/v1/weft/invitations", json={"role": "member", "email": "l@x.example"}, headers=headers)
        path = "/console/join/" + local.json()["link"].rpartition("/")[2]
        assert http.post(path, headers=SAME_SITE, follow_redirects=False).status_code == 303
        assert "l@x.example" in console.get("/runs")
