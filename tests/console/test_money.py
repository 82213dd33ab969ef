"""Budgets, billing and the operator's pages."""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, datetime

import pytest
from fastapi.routing import APIRoute
from sqlalchemy import select

from api.console import sessions
from api.console.install import PAGES
from billing import ledger
from billing.alerts import raise_alert
from store.tables import Alert, Budget, Invoice, LedgerEntry
from tests.console.conftest import SAME_SITE, Console
from tests.console.test_pages import amounts


class TestBudgets:
    def test_set_and_removed(self, console: Console) -> None:
        console.sign_in()
        console.press("/budgets", of="org", limit_usd="100.5", period="month", hard="true", alert_pcts="25, 75%")
        console.press(
            "/budgets", of=f"project:{console.made.projects['evals']}", limit_usd="0.000000001", period="total"
        )
        with console.database.read() as session:
            whole, project = session.scalars(select(Budget).order_by(Budget.limit_nusd.desc()))
        assert (whole.limit_nusd, whole.hard, whole.alert_pcts) == (100_500_000_000, True, [25, 75])
        assert (project.limit_nusd, project.hard, project.period) == (1, False, "total")
        page = console.get("/budgets")
        states = {row["id"]: row for row in console.api("weft/budgets")["budgets"]}
        for budget in (whole, project):
            state = states[budget.id]
            for name in ("limit_nusd", "spent_nusd", "held_nusd", "left_nusd"):
                assert state[name] in amounts(page)
        assert "Project evals" in page
        assert "only tells" in page
        console.press(f"/budgets/{whole.id}/remove")
        console.press(f"/budgets/{whole.id}/remove", status=404)

    @pytest.mark.parametrize(
        ("form", "status"),
        [
            ({"of": "org", "limit_usd": "-1"}, 422),
            ({"of": "org", "limit_usd": "NaN"}, 422),
            ({"of": "org", "limit_usd": "1", "period": "year"}, 422),
            ({"of": "org", "limit_usd": "1", "alert_pcts": "half"}, 400),
            ({"of": "org", "limit_usd": "1", "alert_pcts": "0"}, 422),
            ({"of": "planet", "limit_usd": "1"}, 422),
            ({"of": "project:nothing", "limit_usd": "1"}, 404),
            ({"of": "key:999999", "limit_usd": "1"}, 404),
        ],
    )
    def test_mistakes(self, console: Console, form: dict[str, str], status: int) -> None:
        console.sign_in()
        console.press("/budgets", status=status, **form)

    def test_roles(self, console: Console) -> None:
        console.sign_in("member")
        console.get("/budgets", status=403)
        console.sign_in("viewer")
        assert "Set a budget" not in console.get("/budgets")
        console.press("/budgets", status=403, of="org", limit_usd="1")

    def test_alerts(self, console: Console) -> None:
        made, now = console.made, datetime.now(UTC)

        def write(session: object) -> None:
            for org_id, ref in ((made.org_id, "a"), (made.rival_id, "b"), (None, "c")):
                message = f"<b>alert {ref}</b>"
                raise_alert(session, kind="k", ref=ref, message=message, now=now, org_id=org_id)  # type: ignore[arg-type]

        console.database.write_now(write)
        console.sign_in()
        page = console.get("/budgets")
        assert "&lt;b&gt;alert a&lt;/b&gt;" in page
        assert "alert b" not in page
        assert "alert c" not in page
        with console.database.read() as session:
            assert len(session.scalars(select(Alert).filter_by(kind="k")).all()) == 3


class TestBilling:
    def test_the_ledger(self, console: Console) -> None:
        console.sign_in()
        with console.database.read() as session:
            entries = select(LedgerEntry.amount_nusd).filter_by(org_id=console.made.org_id)
            rows = list(session.scalars(entries.order_by(LedgerEntry.id.desc())))
        shown: list[int] = []
        for number in range(1, len(rows) // 25 + 2):
            page = console.get(f"/billing?page={number}")
            shown += amounts(page[page.index('id="ledger"') :])
        assert shown == rows
        table = list(csv.DictReader(io.StringIO(console.http.get("/console/billing/ledger.csv").text)))
        assert [int(row["amount_usd"].replace(".", "")) for row in table] == rows[::-1]

    def test_memos_are_no_formulas(self, console: Console) -> None:
        console.database.write_now(
            lambda session: ledger.post(
                session,
                org_id=console.made.org_id,
                type="adjustment",
                amount_nusd=5,
                ref_type="t",
                ref_id="r",
                memo='=1+1 <b>"x"</b>',
            )
        )
        console.sign_in()
        assert "=1+1 &lt;b&gt;" in console.get("/billing")
        table = csv.DictReader(io.StringIO(console.http.get("/console/billing/ledger.csv").text))
        assert '\'=1+1 <b>"x"</b>' in [row["memo"] for row in table]

    def test_invoices(self, console: Console) -> None:
        def write(session: object) -> None:
            for number, url in enumerate(("https://pay.example/1", "javascript:alert(1)")):
                invoice = Invoice(
                    id=f"i{number}",
                    org_id=console.made.org_id,
                    period_start=datetime(2026, 9 + number, 1, tzinfo=UTC),
                    total_nusd=12_340_000_000,
                    status="open",
                    hosted_url=url,
                    closed_at=datetime.now(UTC),
                )
                session.add(invoice)  # type: ignore[attr-defined]

        console.database.write_now(write)
        console.sign_in()
        page = console.get("/billing")
        assert 'href="https://pay.example/1"' in page
        assert "javascript:" not in page
        assert "2026-09" in page

    def test_no_cards_where_none_are_taken(self, console: Console) -> None:
        console.sign_in()
        assert "takes no cards" in console.get("/billing")
        assert "no payments" in console.press("/billing/topup", status=404, amount_usd="10").text
        console.sign_in("viewer")
        console.press("/billing/topup", status=403, amount_usd="10")
        console.sign_in("member")
        console.get("/billing", status=403)
        console.get("/billing/ledger.csv", status=403)


class TestOperators:
    def sign_in(self, console: Console, operator: bool) -> None:
        made = console.made
        token = console.database.write_now(
            lambda session: sessions.new_link(session, made.org_id, made.users["owner"], operator=operator)
        )
        console.http.cookies.clear()
        console.http.post(f"/console/login/{token}", headers=SAME_SITE, follow_redirects=False)

    def test_tenants_see_themselves_and_others(self, console: Console) -> None:
        self.sign_in(console, operator=False)
        page = console.get("/queues")
        assert "Rival" not in page
        assert "rival" not in page
        assert re.search(r"You \d+\.\d%", page)
        assert re.search(r"Others \d+\.\d%", page)
        console.get("/ownership", status=403)

    def test_operators_see_everybody(self, console: Console) -> None:
        self.sign_in(console, operator=True)
        page = console.get("/queues?span=1h")
        assert re.search(r"Rival Labs \d+\.\d%", page)
        page = console.get("/ownership?days=30")
        assert "Rival Labs" in page
        assert "GPU-hour" in page
        assert re.search(r"Customers paid</p><p class=\"value\">\$\d+\.\d\d", page)


def test_every_button_needs_its_token(console: Console) -> None:
    """No route of the console changes anything without the CSRF token, but for the two that begin a session."""
    console.sign_in()
    routes = [route for module in PAGES for route in module.router.routes if isinstance(route, APIRoute)]
    assert {method for route in routes for method in route.methods or ()} == {"GET", "POST"}
    buttons = [f"/console{route.path}" for route in routes if "POST" in (route.methods or ())]
    assert len(buttons) > 12
    for button in buttons:
        if "/login" in button:
            continue
        path = re.sub(r"\{\w+\}", "1", button)
        for headers in (SAME_SITE, {**SAME_SITE, "x-csrf-token": "0" * 64}):
            reply = console.http.post(path, headers=headers, data={})
            assert reply.status_code == 403, path
            assert "CSRF" in reply.text
