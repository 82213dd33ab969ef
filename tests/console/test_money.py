"""Budgets, billing and the operator's pages."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from fastapi.routing import APIRoute
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.console import sessions
from api.console.install import PAGES
from api.console.pages.paying import billing
from billing.money import ledger
from billing.money.alerts import raise_alert, resolve_alert
from billing.money.wallets import set_mode
from store.people.organisations import LIMITS
from store.tables import Budget, Invoice, LedgerEntry, Organisation
from tests.console.conftest import SAME_SITE, Console, take_cards
from tests.console.seed import TOPUP_NUSD
from tests.console.test_pages import amounts
from tests.fakestripe import FakeStripe, fake_stripe
from tests.servers import free_port


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


def raise_three(console: Console) -> None:
    """Raise three alerts: for this organisation, for another one, and for the operator only."""
    made, now = console.made, datetime.now(UTC)

    def write(session: Session) -> None:
        for org_id, ref in ((made.org_id, "a"), (made.rival_id, "b"), (None, "c")):
            raise_alert(session, kind="k", ref=ref, message=f"<b>alert {ref}</b>", now=now, org_id=org_id)

    console.database.write_now(write)


@pytest.mark.parametrize("path", ["/", "/billing"])
def test_how_an_organisation_pays_is_said_as_it_is(console: Console, path: str) -> None:
    console.sign_in()
    for mode in ("prepaid", "postpaid"):
        console.database.write_now(lambda session, mode=mode: set_mode(session, console.made.org_id, mode, 0))  # type: ignore[misc]
        assert f'<p class="note">{mode}</p>' in console.get(path)


class TestAlerts:
    @pytest.mark.parametrize("path", ["/", "/budgets"])
    def test_ones_own(self, console: Console, path: str) -> None:
        console.sign_in()
        raise_three(console)
        page = console.get(path)
        assert "&lt;b&gt;alert a&lt;/b&gt;" in page
        assert "alert b" not in page
        assert "alert c" not in page

    @pytest.mark.parametrize("path", ["/", "/budgets"])
    def test_operators_see_all(self, console: Console, path: str) -> None:
        raise_three(console)
        sign_in_by_link(console, operator=True)
        page = console.get(path)
        assert all(f"alert {ref}&lt;/b&gt;" in page for ref in "abc")
        assert "Rival Labs" in page

    def test_what_is_over_is_on_the_list_only(self, console: Console) -> None:
        raise_three(console)
        console.database.write_now(lambda session: resolve_alert(session, kind="k", ref="a", now=datetime.now(UTC)))
        console.sign_in()
        assert "alert a" not in console.get("/")
        assert "alert a" in console.get("/budgets")

    def test_members_are_not_troubled(self, console: Console) -> None:
        raise_three(console)
        console.sign_in("member")
        assert "alert a" not in console.get("/")


class TestRateLimits:
    def test_set_and_taken_away(self, console: Console) -> None:
        console.sign_in()
        key = next(key["id"] for key in console.api("weft/keys")["keys"] if key["name"] == "member's laptop")
        evals = console.made.projects["evals"]
        console.press("/limits", of=f"key:{key}", requests_per_minute="120", max_in_flight="8", tokens_per_minute="")
        console.press("/limits", of=f"project:{evals}", tokens_per_minute="2000000")
        limits = {(entry["scope"], entry["id"]): entry for entry in console.api("weft/rate_limits")["limits"]}
        found = limits["key", str(key)]
        assert [found[name] for name in LIMITS] == [120, None, 8]
        assert limits["project", evals]["tokens_per_minute"] == 2_000_000
        page = console.get(f"/budgets?of=key:{key}")
        assert "2,000,000" in page
        assert "Key member&#39;s laptop" in page
        assert re.search(rf'<option value="key:{key}" selected>', page)
        assert re.search(r'name="requests_per_minute"[^>]*value="120"', page)
        assert f"/console/budgets?of=key:{key}#limits" in console.get("/keys")
        assert f"of=project%3A{evals}#limits" in console.get("/members")
        console.press("/limits", of=f"key:{key}")
        assert ("key", str(key)) not in {(e["scope"], e["id"]) for e in console.api("weft/rate_limits")["limits"]}

    @pytest.mark.parametrize(
        ("form", "status"),
        [
            ({"of": "org", "requests_per_minute": "1"}, 422),
            ({"of": "key:999999", "requests_per_minute": "1"}, 404),
            ({"of": "project:nothing", "requests_per_minute": "1"}, 404),
            ({"of": "key:1", "requests_per_minute": "0"}, 422),
            ({"of": "key:1", "requests_per_minute": "many"}, 422),
            ({"of": "key:1", "max_in_flight": str(2**40)}, 422),
        ],
    )
    def test_mistakes(self, console: Console, form: dict[str, str], status: int) -> None:
        console.sign_in()
        console.press("/limits", status=status, **form)

    def test_only_admins(self, console: Console) -> None:
        console.sign_in("viewer")
        assert "Set rate limits" not in console.get("/budgets")
        console.press("/limits", status=403, of="key:1", requests_per_minute="1")


class TestBilling:
    def test_the_ledger_is_told_by_day_and_run(self, console: Console) -> None:
        console.sign_in()
        with console.database.read() as session:
            entries = select(LedgerEntry).filter_by(org_id=console.made.org_id).order_by(LedgerEntry.id.desc())
            stored = list(session.scalars(entries))
        rows = [entry.amount_nusd for entry in stored]
        shown: list[int] = []
        path: str | None = "/billing"
        while path is not None:
            page = console.get(path)
            shown += amounts(page[page.index('id="ledger"') :])
            older = re.search(r'href="(\?before=[\d-]+)#ledger"', page)
            path = f"/billing{older.group(1)}" if older else None
        assert sum(shown) == sum(rows)
        assert len(shown) < len(rows), "a line for a run and day, not for a settlement"
        others = [entry.amount_nusd for entry in stored if entry.type != "usage"]
        assert [amount for amount in shown if amount > 0] == [amount for amount in others if amount > 0]
        table = list(csv.DictReader(io.StringIO(console.http.get("/console/billing/ledger.csv").text)))
        assert [int(row["amount_usd"].replace(".", "")) for row in table] == rows[::-1]

    def test_the_export_has_every_entry_however_many(self, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
        """The sum of its entries is the balance."""
        monkeypatch.setattr(billing, "AT_A_TIME", 2)
        console.sign_in()
        with console.database.read() as session:
            rows = list(session.scalars(select(LedgerEntry.amount_nusd).filter_by(org_id=console.made.org_id)))
        assert len(rows) > 2
        table = csv.DictReader(io.StringIO(console.http.get("/console/billing/ledger.csv").text))
        assert sum(int(row["amount_usd"].replace(".", "")) for row in table) == sum(rows)

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


class TestTopUps:
    @pytest.fixture
    def stripe(self, console: Console) -> Iterator[FakeStripe]:
        """Let the console take cards, with a fake Stripe."""
        with fake_stripe() as server:
            server.reset(datetime.now(UTC))
            take_cards(console, server.settings().model_copy(update={"public_url": "https://weft.example"}))
            yield server

    def test_to_stripes_page_and_back(self, console: Console, stripe: FakeStripe) -> None:
        console.sign_in()
        assert "Pay by card" in console.get("/billing")
        reply = console.press("/billing/topup", status=204, amount_usd="25.50")
        (checkout,) = stripe.stripe.all("checkout.session")
        assert reply.headers["hx-redirect"] == checkout["url"]
        assert checkout["amount_total"] == 2550
        form = next(form for _, path, form in stripe.front.requests if path == "/v1/checkout/sessions")
        assert form["success_url"].startswith("https://weft.example/console/billing")
        with console.database.read() as session:
            org = session.get_one(Organisation, console.made.org_id)
        assert checkout["customer"] == org.stripe_customer_id
        assert console.api("weft/balance")["balance_nusd"] < TOPUP_NUSD  # nothing is credited before it is paid

    def test_amounts_that_are_not_taken(self, console: Console, stripe: FakeStripe) -> None:
        console.sign_in()
        console.press("/billing/topup", status=400, amount_usd="0.01")
        for amount in ("-5", "1.005", "much"):
            console.press("/billing/topup", status=422, amount_usd=amount)
        assert stripe.stripe.all("checkout.session") == []

    def test_a_stripe_that_does_not_answer(self, console: Console, stripe: FakeStripe) -> None:
        take_cards(console, stripe.settings().model_copy(update={"api_base": f"http://127.0.0.1:{free_port()}"}))
        console.sign_in()
        assert "nothing was charged" in console.press("/billing/topup", status=503, amount_usd="25").text


def sign_in_by_link(console: Console, operator: bool) -> None:
    made = console.made
    token = console.database.write_now(
        lambda session: sessions.new_link(session, made.org_id, made.users["owner"], operator=operator)
    )
    console.http.cookies.clear()
    console.http.post(f"/console/login/{token}", headers=SAME_SITE, follow_redirects=False)


class TestOperators:
    def test_tenants_see_themselves_and_others(self, console: Console) -> None:
        sign_in_by_link(console, operator=False)
        page = console.get("/queues")
        assert "is loading its models" not in page
        assert "Rival" not in page
        assert "rival" not in page
        assert re.search(r"You \d+\.\d%", page)
        assert re.search(r"Others \d+\.\d%", page)
        console.get("/ownership", status=403)

    def test_everybody_sees_that_a_worker_loads(self, console: Console) -> None:
        sign_in_by_link(console, operator=False)
        state = console.http.app.state  # type: ignore[attr-defined]
        before = state.service
        state.service = replace(before, stats=lambda: {"generator": {"loading": {"generator-host-1": 71.2}}})
        try:
            page = console.get("/queues")
        finally:
            state.service = before
        assert "A generator is loading its models, for 71 s now" in page
        assert "host" not in page.partition("is loading its models")[0][-200:]

    def test_operators_see_everybody(self, console: Console) -> None:
        sign_in_by_link(console, operator=True)
        page = console.get("/queues?span=1h")
        assert re.search(r"Rival Labs \d+\.\d%", page)
        page = console.get("/ownership?days=30")
        assert "Rival Labs" in page
        assert "GPU-hour" in page
        assert re.search(r"Customers paid</p><p class=\"value\">\$\d+\.\d\d", page)


def test_every_button_needs_its_token(console: Console) -> None:
    """No route of the console changes anything without the CSRF token, except those that begin a session, which must
    not come from another site."""
    console.sign_in()
    routes = [route for module in PAGES for route in module.router.routes if isinstance(route, APIRoute)]
    assert {method for route in routes for method in route.methods or ()} == {"GET", "POST"}
    buttons = [route.path for route in routes if "POST" in (route.methods or ())]
    assert len(buttons) > 12
    for button in buttons:
        path = re.sub(r"\{\w+\}", "1", button)
        if button.startswith(("/console/login", "/console/sso", "/console/join")):
            reply = console.http.post(path, headers={"sec-fetch-site": "cross-site"}, data={"key": "x"})
            assert reply.status_code == 403, path
            continue
        for headers in (SAME_SITE, {**SAME_SITE, "x-csrf-token": "0" * 64}):
            reply = console.http.post(path, headers=headers, data={})
            assert reply.status_code == 403, path
            assert "CSRF" in reply.text
