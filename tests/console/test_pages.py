"""Pages show the numbers of the API and the ledger, and hostile names as text; exports contain no formulas."""

from __future__ import annotations

import csv
import html
import io
import re
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session
from weft.money import usd

from api.console import formats
from api.console.security import CSP
from billing.money.wallets import set_default
from store.settings import BillingSettings
from store.tables import Checkpoint, LedgerEntry, Project, Run, Session as Owner, UsageEvent, Wallet
from tests.console.conftest import SAME_SITE, Console
from tests.console.seed import HOSTILE


def amounts(page: str) -> list[int]:
    """Every amount on a page, exactly, in nano-USD."""
    found = re.findall(r'<data class="usd" value="(-?)(\d+)\.(\d{9})"', page)
    return [(-1 if sign else 1) * (int(whole) * 10**9 + int(rest)) for sign, whole, rest in found]


def ledger_total(console: Console) -> int:
    with console.database.read() as session:
        query = select(LedgerEntry.amount_nusd).filter_by(org_id=console.made.org_id, type="usage")
        return -sum(session.scalars(query))


class TestNumbers:
    def test_usage_is_the_api_is_the_ledger(self, console: Console) -> None:
        console.sign_in()
        total = ledger_total(console)
        assert total == console.api("weft/usage")["total_nusd"] > 0
        for split in ("model", "project", "key", "user", "run", "kind"):
            page = console.get(f"/usage?by={split}")
            (shown,) = amounts(re.search(r'id="total">(.*?)</strong>', page).group(1))  # type: ignore[union-attr]
            assert shown == total
            rows = page[page.rindex("<tbody>") : page.rindex("</tbody>")]
            lasts = [amounts(row)[-1] for row in rows.split("</tr>") if "<td" in row]
            assert sum(lasts) == total

    def test_overview(self, console: Console) -> None:
        console.sign_in()
        page = console.get("/")
        with console.database.read() as session:
            wallet = session.get_one(Wallet, console.made.org_id)
        balance, held, month = amounts(page)[:3]
        assert (balance, held) == (wallet.balance_nusd, wallet.held_nusd)
        api = console.api("weft/balance")
        assert month == api["spent_this_month_nusd"]

    def test_a_run(self, console: Console) -> None:
        console.sign_in()
        run = console.made.runs[0]
        spent = console.api(f"weft/usage?run_id={run}")["total_nusd"]
        page = console.get(f"/runs/{run}")
        assert amounts(page)[0] == spent
        live = console.http.get(f"/console/runs/{run}/live").json()
        assert live["cost_usd"] == usd(spent)
        assert live["curves"] == console.api(f"weft/runs/{run}/metrics")["curves"]
        assert spent in amounts(console.get("/runs"))

    def test_days_left(self, console: Console) -> None:
        console.sign_in()
        page = console.get("/")
        with console.database.read() as session:
            wallet = session.get_one(Wallet, console.made.org_id)
            since = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=6)
            week = sum(
                session.scalars(
                    select(UsageEvent.amount_nusd).where(
                        UsageEvent.org_id == wallet.org_id, UsageEvent.recorded_at >= since
                    )
                )
            )
        left = wallet.balance_nusd // (week // 7)
        assert re.search(rf'Days left</p><p class="value">{left}<', page)


class TestUsage:
    def test_filters_narrow(self, console: Console) -> None:
        console.sign_in()
        project = console.made.projects["evals"]
        page = console.get(f"/usage?by=run&project={project}")
        with console.database.read() as session:
            query = select(UsageEvent.amount_nusd).filter_by(org_id=console.made.org_id, project_id=project)
            assert sum(session.scalars(query)) in amounts(page)
        assert "Project: evals" in page
        none = console.get("/usage?by=run&project=-")
        everything = ledger_total(console)
        assert everything not in amounts(page)
        assert everything not in amounts(none)

    def test_days(self, console: Console) -> None:
        console.sign_in()
        today = datetime.now(UTC).date()
        empty = console.get(f"/usage?first={today - timedelta(days=99)}&last={today - timedelta(days=90)}")
        assert "Nothing was used in this period" in empty
        wrong = ("days=0", "days=400", f"first={today}&last={today - timedelta(days=1)}", "first=x", "by=x")
        for query in (*wrong, "last=0001-01-01", "last=9999-12-31"):
            assert console.http.get(f"/console/usage?{query}").status_code in (400, 422)

    def test_strange_filters_match_nothing(self, console: Console) -> None:
        console.sign_in()
        for query in ("key=abc", "key=99999999999999999999", "run=' OR 1=1 --", "user=%F0%9F%98%80"):
            assert "Nothing was used" in console.get(f"/usage?{query}")
        assert console.http.get("/console/usage?model=%00").status_code == 422

    def test_csv(self, console: Console) -> None:
        console.sign_in()
        reply = console.http.get("/console/usage.csv?by=run")
        assert reply.headers["content-type"].startswith("text/csv")
        assert reply.headers["content-disposition"].startswith("attachment; filename=")
        rows = list(csv.DictReader(io.StringIO(reply.text)))
        total = sum(int(row["amount_usd"].replace(".", "")) for row in rows)
        assert total == ledger_total(console)
        assert {row["run"] if "run" in row else row["name"] for row in rows} >= {console.made.runs[0]}

    @pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
    def test_no_cell_is_a_formula(self, console: Console, start: str) -> None:
        name = f'{start}HYPERLINK("http://evil")'

        def rename(session: Session) -> None:
            session.get_one(Project, (console.made.org_id, console.made.projects["evals"])).name = name

        console.database.write_now(rename)
        console.sign_in()
        rows = list(csv.DictReader(io.StringIO(console.http.get("/console/usage.csv?by=project").text)))
        (shown,) = {row["name"] for row in rows if "HYPERLINK" in row["name"]}
        assert shown == f"'{name}"


class TestHostileNames:
    def test_are_text(self, console: Console) -> None:
        console.sign_in()
        run = console.made.runs[-1]
        for path in ("/", "/runs", f"/runs/{run}"):
            page = console.get(path)
            assert HOSTILE not in page
            assert html.escape(HOSTILE, quote=False).split("&quot;")[0].split('"')[0] in page
            assert "49" not in re.findall(r"onerror=alert\(1\)&gt;&#34;&#39;(.{0,8})", page)
        assert "<img src=x" not in console.get("/usage?run=%3Cimg%20src=x%20onerror=alert(1)%3E")
        assert "<script" not in console.get("/runs?search=%3Cscript%3E").split("</head>")[1]

    def test_in_errors(self, console: Console) -> None:
        console.sign_in()
        page = console.get("/runs/%3Cimg%20src=x%3E", status=404)
        assert "<img src=x>" not in page
        assert "&lt;img src=x&gt;" in page


def test_nothing_inline(console: Console) -> None:
    console.sign_in()
    for path in ("/", "/usage", "/runs", f"/runs/{console.made.runs[0]}", "/checkpoints", "/audit"):
        page = console.get(path)
        assert not re.findall(r"<script(?![^>]*\bsrc=)", page)
        assert not re.findall(r"<style|\sstyle=|\son[a-z]+=\"|hx-on|javascript:|hx-vals='js", page)


def test_a_run_whose_client_is_silent_is_lost(console: Console) -> None:
    run_id = console.made.runs[0]

    def heard(session: Session, ago: timedelta) -> None:
        run = session.get_one(Run, run_id)
        owner = session.get_one(Owner, run.session_id)
        run.state, owner.state = "live", "active"
        run.last_request_at = owner.last_seen_at = datetime.now(UTC) - ago

    console.sign_in()
    for ago, state in ((timedelta(seconds=5), "live"), (timedelta(minutes=3), "lost")):
        console.database.write_now(partial(heard, ago=ago))
        assert f'<span class="state {state}">{state}</span>' in console.get(f"/runs/{run_id}")
        assert f'<span class="state {state}">' in console.get(f"/runs?search={run_id}")


def test_a_run_is_linked_to_what_it_goes_on_from(console: Console) -> None:
    first, second = console.made.runs[:2]

    def link(session: Session, path: str) -> None:
        run = session.get_one(Run, second)
        run.user_metadata = {**run.user_metadata, "continued_from": path}

    console.sign_in()
    console.database.write_now(partial(link, path=f"tinker://{first}/weights/w"))
    said = rf'<a href="[^"]*/runs/{first}" title="tinker://{first}/weights/w">w of gsm8k-grpo</a>'
    assert re.search(said, console.get(f"/runs/{second}").replace("%3A", ":"))
    console.database.write_now(partial(link, path="<b>x"))
    assert "&lt;b&gt;x</dd>" in console.get(f"/runs/{second}")


def test_lists_are_paged(console: Console) -> None:
    def more(session: Session) -> None:
        first = session.get_one(Run, console.made.runs[0])
        names = [column.name for column in Run.__table__.columns]
        for number in range(60):
            row = Run(**{name: getattr(first, name) for name in names})
            row.id, row.model_seq_id = f"{first.session_id}:train:{number + 1}", number + 1
            session.add(row)

    console.database.write_now(more)
    console.sign_in()
    seen = [
        run for page in (1, 2, 3) for run in re.findall(r'/console/runs/([^"?/]+)"', console.get(f"/runs?page={page}"))
    ]
    assert len(seen) == len(set(seen)) == 66
    assert "1–25 of 66" in console.get("/runs")
    assert "No runs yet" in console.get("/runs?page=9")
    assert console.http.get("/console/runs?page=0").status_code == 422


def test_checkpoints_expire_and_go(console: Console) -> None:
    console.sign_in()
    path = f"tinker://{console.made.runs[0]}/weights/step-200"
    console.press("/checkpoints/ttl", path=path, days=7)
    with console.database.read() as session:
        row = session.get_one(Checkpoint, "checkpoint-0-200")
    assert row.expires_at is not None
    assert abs(row.expires_at - datetime.now(UTC) - timedelta(days=7)) < timedelta(minutes=2)
    console.press("/checkpoints/ttl", path=path, days=0)
    with console.database.read() as session:
        assert session.get_one(Checkpoint, "checkpoint-0-200").expires_at is None
    assert console.press("/checkpoints/delete", path=path).headers["hx-refresh"] == "true"
    assert path not in console.get("/checkpoints")
    console.press("/checkpoints/delete", path=path, status=404)
    console.press("/checkpoints/delete", path="nonsense", status=400)
    log = console.get("/audit?group=checkpoints")
    for told in ("let the checkpoint “step-200 of gsm8k-grpo” expire after 7 days", "deleted the checkpoint “step-200"):
        assert f"owner@acme.example {told}" in log


def test_what_to_do_when_there_is_nothing(console: Console) -> None:
    console.sign_in("rival")

    def forget(session: Session) -> None:
        session.delete(session.get_one(Run, "rival-session:train:0"))

    console.database.write_now(forget)
    assert "weft.log" in console.get("/")
    assert "create_lora_training_client" in console.get("/runs")
    assert "save_state" in console.get("/checkpoints")


def test_a_page_that_is_not_there_is_a_page(console: Console) -> None:
    for path in ("/nothing", "/runs/x/y/z", "/<b>"):
        reply = console.http.get(f"/console{path}", headers={"accept": "text/html"})
        assert reply.status_code == 404
        assert reply.headers["content-type"].startswith("text/html")
        assert "Not found" in reply.text
        assert "this server has no GET /console/" in reply.text
        assert "<b>" not in reply.text
    assert console.http.post("/console/nothing", headers=SAME_SITE).status_code in (403, 404, 405)


def test_a_browser_that_goes_astray_outside_the_console_gets_a_page_and_a_program_json(console: Console) -> None:
    browsers = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
    for path in ("/consol", "/nothing/<b>", "/v1/chat/completion"):
        reply = console.http.get(path, headers=browsers)
        assert reply.status_code == 404
        assert reply.headers["content-type"].startswith("text/html")
        assert reply.headers["content-security-policy"] == CSP
        assert 'href="/console/"' in reply.text
        assert f"this server has no GET {html.escape(path)}" in reply.text
        assert console.http.get(path).json()["code"] == "not_supported"


def test_quotas_are_shown(console: Console) -> None:
    console.sign_in()
    page = console.get("/budgets")
    quotas = page[page.index('id="quotas"') :]
    with console.database.read() as session:
        live = session.scalar(select(func.count()).select_from(Run).filter_by(org_id=console.made.org_id, state="live"))
    row = re.search(r'<td class="name">Runs</td><td class="n">(\d+)</td>', quotas)
    assert row is not None
    assert int(row[1]) == live


def test_an_account_without_a_limit(console: Console) -> None:
    console.sign_in("rival")
    page = console.get("/")
    assert "Balance" not in page
    assert "no limit on this account" in page
    assert "Without one, nothing limits what is spent" in console.get("/budgets")
    assert "Top up" not in console.get("/billing")


def test_who_has_used_nothing_yet_is_shown_the_wallet_that_the_first_use_makes(console: Console) -> None:
    """Else on a prepaid server nothing would look limited until the first refusal."""

    def unused(session: Session) -> None:
        set_default(session, BillingSettings(mode="prepaid"))
        session.execute(delete(Wallet).where(Wallet.org_id != console.made.org_id))

    console.database.write_now(unused)
    console.sign_in("rival")
    assert "Balance" in console.get("/")
    assert "Can be spent" in console.get("/billing")
    assert "only the wallet limits what is spent" in console.get("/budgets")
    balance = console.api("weft/balance", "rival")
    assert (balance["mode"], balance["balance_nusd"], balance["available_nusd"]) == ("prepaid", 0, 0)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "$0.00"),
        (1, "<$0.0001"),
        (100_000, "$0.0001"),
        (1_234_567_891, "$1.2346"),
        (99_999_950_000, "$100.0000"),
        (1_234_567_895_000_000, "$1,234,567.90"),
        (-2_500_000_000, "−$2.50"),
    ],
)
def test_money_reads(amount: int, text: str) -> None:
    assert formats.usd_text(amount) == text


def test_the_wallet_of_the_seed_is_its_ledger(console: Console) -> None:
    """The seeded organisation's wallet is the sum of its ledger, so the tests above compare pages with sound data."""
    with console.database.read() as session:
        entries = sum(session.scalars(select(LedgerEntry.amount_nusd).filter_by(org_id=console.made.org_id)))
        assert session.get_one(Wallet, console.made.org_id).balance_nusd == entries
        events = sum(session.scalars(select(UsageEvent.amount_nusd).filter_by(org_id=console.made.org_id)))
    assert events == ledger_total(console)
