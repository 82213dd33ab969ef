"""The console in Chromium, under its own Content-Security-Policy, used by mouse, by keyboard and on a telephone."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import select
from weft.money import usd

from api.console.formats import usd_text
from store.tables import ApiKey, LedgerEntry, Wallet
from tests.console.conftest import CHROMIUM, WATCH, Console, Open, take_cards
from tests.console.provider import provider_process
from tests.console.screenshots import sign_in
from tests.console.sso import person, take_provider
from tests.fakestripe import fake_stripe
from tests.servers import free_port

pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"needs Chromium at {CHROMIUM}")

NARROW: Any = {"width": 375, "height": 780}
WIDE: Any = {"width": 1280, "height": 860}


@pytest.fixture(name="console")
def of_the_site(site: Console) -> Console:
    return site


def violations(page: Page) -> list[str]:
    found: list[str] = page.evaluate("window.violations")
    return found


def test_the_listener_sees_violations(console: Console, browser: Browser) -> None:
    """Otherwise no test of a page could fail."""
    context = browser.new_context()
    context.add_init_script(WATCH)
    page = context.new_page()
    sign_in(page, console)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"color:red\">x</p>')")
    page.evaluate(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)"
    )
    page.wait_for_function("window.violations.length >= 2")
    assert page.evaluate("window.ran") is None
    context.close()


#: Markup that an injection could put into a page, and the directive that stops it.
INJECTED = {
    "script-src-attr": "<img src='' onerror='window.ran = 1'>",
    "script-src-elem": "<a href='javascript:window.ran = 1'>press</a>",
    "frame-src": "<iframe src='/console/login'></iframe>",
    "object-src": "<object data='/console/login'></object>",
    "base-uri": "<base href='https://elsewhere.example/'>",
    "form-action": "<form action='https://elsewhere.example/'><button>press</button></form>",
    "style-src-elem": "<link rel='stylesheet' href='https://elsewhere.example/a.css'>",
    "img-src": "<img src='https://elsewhere.example/a.png'>",
    "media-src": "<video src='https://elsewhere.example/a.mp4'></video>",
}


def test_what_is_injected_does_nothing(console: Console, browser: Browser) -> None:
    with closing(browser.new_context()) as context:
        context.add_init_script(WATCH)
        context.add_cookies([console.cookie("owner")])  # type: ignore[list-item]
        for directive, html in INJECTED.items():
            page = context.new_page()  # a page whose request was blocked would wait for it
            page.goto(f"{console.url}/console/keys")
            page.evaluate("(html) => document.body.insertAdjacentHTML('afterbegin', html)", html)
            for button in page.get_by_text("press", exact=True).all():
                button.click(no_wait_after=True)
            page.wait_for_function("(name) => window.violations.some((found) => found.startsWith(name))", arg=directive)
            assert page.evaluate("window.ran") is None
            assert page.url.startswith(console.url)


def test_injected_attributes_of_htmx_run_nothing_and_ask_nobody_else(console: Console, browser: Browser) -> None:
    with closing(browser.new_context()) as context:
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        sign_in(page, console)
        asked.clear()
        page.evaluate(
            """() => {
                const html = `<p hx-on:click="window.ran = 1" hx-get="https://elsewhere.example/" hx-trigger="click"
                    hx-vals="js:{a: window.ran = 1}">press</p>
                    <p hx-get="/console/queues" hx-trigger="click[window.ran = 1]">press</p>`;
                document.body.insertAdjacentHTML("afterbegin", html);
                htmx.process(document.body);
            }"""
        )
        for button in page.get_by_text("press", exact=True).all():
            button.click()
        page.wait_for_timeout(300)
        assert page.evaluate("window.ran") is None
        assert not [url for url in asked if not url.startswith(console.url)]


def test_no_other_site_frames_a_page(console: Console, browser: Browser) -> None:
    with closing(browser.new_context()) as context:
        page = context.new_page()
        refused: list[str] = []
        page.on("console", lambda message: refused.append(message.text))
        page.set_content(f"<iframe src='{console.url}/console/login'></iframe>")
        until = time.monotonic() + 60
        while not any("frame-ancestors" in text for text in refused):
            page.wait_for_timeout(50)
            assert time.monotonic() < until, refused


def test_hostile_names_stay_text(console: Console, open_page: Open) -> None:
    page = open_page("/runs")
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    for path in ("/runs", f"/runs/{console.made.runs[-1]}", "/usage?by=run", "/queues"):
        page.goto(f"{console.url}/console{path}")
        page.wait_for_load_state("networkidle")
        assert page.locator("img[src=x]").count() == 0
    page.goto(f"{console.url}/console/runs")
    expect(page.get_by_role("link", name="<img src=x onerror=alert(1)>")).to_be_visible()


def test_signing_in_by_a_provider(console: Console, open_page: Open) -> None:
    """To the provider and back, from an invitation's button and from the sign-in page's, under all pages' policy."""
    service = console.app.state.service
    with provider_process() as issuer:
        take_provider(console, issuer, public_url=console.url)
        person(issuer, "guest")
        page = open_page("/members")
        page.get_by_label("Days").fill("2")
        page.get_by_role("button", name="Make a link").click()
        link = page.locator("#secret").inner_text()
        page = open_page(role=None, refusals=True)  # the provider's own page loads a style sheet from another site
        page.goto(link)
        page.get_by_role("button", name="Sign in with Corp and join").click()
        page.get_by_placeholder("sub").fill("guest")
        page.get_by_role("button", name="Authorize").click()
        page.wait_for_url(f"{console.url}/console/")
        expect(page.get_by_text("guest@corp.example").first).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("button", name="Sign in with Corp").click()
        page.get_by_placeholder("sub").fill("guest")
        page.get_by_role("button", name="Authorize").click()
        page.wait_for_url(f"{console.url}/console/")
        assert violations(page) == []
    console.app.state.service = service


def test_a_provider_that_is_away_is_said(console: Console, open_page: Open) -> None:
    service = console.app.state.service
    take_provider(console, f"http://localhost:{free_port()}", public_url=console.url)
    page = open_page(role=None, refusals=True)
    page.goto(f"{console.url}/console/login")
    page.get_by_role("button", name="Sign in with Corp").click()
    expect(page.locator("#toast")).to_contain_text("cannot be asked just now")
    console.app.state.service = service


def test_numbers_on_screen_are_the_ledger(console: Console, open_page: Open) -> None:
    with console.database.read() as session:
        wallet = session.get_one(Wallet, console.made.org_id)
        entries = select(LedgerEntry.amount_nusd).filter_by(org_id=wallet.org_id, type="usage")
        spent = -sum(session.scalars(entries))
    page = open_page("/billing")
    balance = page.locator(".tile", has=page.get_by_text("Balance", exact=True)).locator("data")
    assert balance.get_attribute("value") == usd(wallet.balance_nusd)
    expect(balance).to_have_text(usd_text(wallet.balance_nusd))
    page.goto(f"{console.url}/console/usage")
    assert console.api("weft/usage")["total_usd"] == usd(spent)
    assert page.locator("#total data").get_attribute("value") == usd(spent)
    expect(page.locator("#total")).to_have_text(usd_text(spent))
    cells = page.locator("table").last.locator("tbody tr td:last-child data").all()
    assert sum(int((cell.get_attribute("value") or "").replace(".", "")) for cell in cells) == spent


def test_a_run_while_it_runs(console: Console, open_page: Open) -> None:
    """The curves and the cost move on the open page as the user logs and the run is billed."""
    run = console.made.runs[0]
    page = open_page(f"/runs/{run}")
    reward = page.locator("[data-curve=reward]")
    expect(reward.locator(".at")).to_have_text("step 239")
    before = page.locator("#cost data").get_attribute("value")
    assert before == console.api(f"weft/usage?run_id={run}")["total_usd"]
    body = {"points": [{"name": "reward", "step": 240, "value": 0.9321}, {"name": "new one", "step": 0, "value": 1}]}
    reply = console.http.post(
        f"/api/v1/weft/runs/{run}/metrics", json=body, headers={"x-api-key": console.made.keys["owner"]}
    )
    assert reply.status_code == 200, reply.text
    console.bill(run, 1_000_000)
    expect(reward.locator(".at")).to_have_text("step 240")
    expect(reward.locator(".latest")).to_have_text("0.9321")
    expect(page.locator("[data-curve='new one'] canvas")).to_be_visible()
    expect(page.locator("#cost data")).not_to_have_attribute("value", before)
    after = console.api(f"weft/usage?run_id={run}")["total_usd"]
    expect(page.locator("#cost data")).to_have_attribute("value", after)
    expect(page.locator("#cost")).to_contain_text(usd_text(int(after.replace(".", ""))))


def test_a_curve_against_cost(console: Console, open_page: Open) -> None:
    page = open_page(f"/runs/{console.made.runs[0]}")
    chart = page.locator("[data-curve=loss] .chart")
    expect(chart.locator("canvas")).to_be_visible()
    page.get_by_role("button", name="Cost", exact=True).click()
    expect(page.get_by_role("button", name="Cost", exact=True)).to_have_attribute("aria-pressed", "true")
    chart.hover(position={"x": 250, "y": 80})
    expect(chart.locator(".tip")).to_be_visible()
    expect(chart.locator(".tip")).to_contain_text("Step")
    expect(chart.locator(".tip")).to_contain_text("$")


def test_the_menu_of_a_telephone(open_page: Open) -> None:
    page = open_page(viewport=NARROW)
    menu = page.get_by_role("button", name="Menu")
    expect(page.get_by_role("link", name="Usage", exact=True)).to_be_hidden()
    menu.click()
    page.get_by_role("link", name="Usage", exact=True).click()
    page.wait_for_url("**/console/usage")


def test_on_a_telephone_a_kind_has_its_colour_beside_its_name(console: Console, open_page: Open) -> None:
    page = open_page(f"/runs/{console.made.runs[0]}", viewport=NARROW)
    cells = page.locator("td:not(.name):has(> .dot)")
    expect(cells.first).to_be_visible()
    between = """cell => {
        const name = document.createRange();
        name.selectNodeContents(cell.lastChild);
        return name.getBoundingClientRect().left - cell.querySelector(".dot").getBoundingClientRect().right;
    }"""
    assert all(0 <= cell.evaluate(between) < 16 for cell in cells.all())


def test_by_keyboard_alone(console: Console, open_page: Open) -> None:
    page = open_page(role=None)
    page.goto(f"{console.url}/console/runs?state=live")
    page.wait_for_url("**/console/login?next=**")
    page.keyboard.type(console.made.keys["owner"])  # the field has the focus
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/runs?state=live")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    focused = "document.activeElement.closest('main') !== null || document.activeElement.id === 'main'"
    page.wait_for_function(focused)
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "gsm8k-grpo":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/runs/5e550000-acme**")
    link = page.get_by_role("link", name="Billing")
    for _ in range(40):
        page.keyboard.press("Tab")
        if link.evaluate("element => element === document.activeElement"):
            break
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/billing")


def test_deleting_by_keyboard_keeps_the_place_on_the_page(open_page: Open) -> None:
    """The page is loaded again, and would otherwise begin at its top."""
    page = open_page("/checkpoints")
    answer = {"status": 200, "headers": {"hx-refresh": "true"}, "body": "Checkpoint deleted"}
    page.route("**/checkpoints/delete", lambda route: route.fulfill(**answer))  # it stays: other tests need it
    page.on("dialog", lambda dialog: dialog.accept())
    button = page.get_by_role("button", name="Delete step-200 of gsm8k-grpo")
    button.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#toast")).to_have_text("Checkpoint deleted")
    expect(button).to_be_focused()


def test_escape_closes_what_is_open(open_page: Open) -> None:
    page = open_page("/runs", viewport=NARROW)
    menu = page.get_by_role("button", name="Menu")
    menu.focus()
    page.keyboard.press("Enter")
    expect(menu).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(menu).to_have_attribute("aria-expanded", "false")
    expect(menu).to_be_focused()
    page.keyboard.press("Control+k")
    page.keyboard.type("gsm")  # at Escape a browser would clear this text first
    page.keyboard.press("Escape")
    expect(page.locator("#search-box")).to_be_hidden()
    expect(menu).to_be_focused()


def test_a_key_is_shown_once(console: Console, open_page: Open) -> None:
    page = open_page("/keys")
    page.get_by_label("Name").fill("from the browser")
    page.get_by_role("button", name="Make key").click()
    secret = page.locator("#secret").inner_text()
    assert secret.startswith("tml-")
    assert console.http.get("/api/v1/weft/limits", headers={"x-api-key": secret}).status_code == 200
    with console.database.read() as session:
        row = session.scalars(select(ApiKey).filter_by(name="from the browser")).one()
    assert secret not in str(vars(row))
    assert (row.scopes, row.user_id) == (
        ["checkpoints:read", "checkpoints:write", "sample", "train"],
        console.made.users["owner"],
    )
    page.reload()
    expect(page.get_by_text("from the browser")).to_be_visible()
    assert secret not in page.content()
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("tr", has_text="from the browser").get_by_role("button", name="Revoke").click()
    expect(page.locator("#toast")).to_have_text("Key revoked")
    expect(page.locator("#keys > section").first.get_by_text("from the browser")).to_have_count(0)


def test_a_button_pressed_twice_does_it_once(console: Console, open_page: Open) -> None:
    """On a double click the secret of a second key would replace the first one's, which nobody would have seen."""
    page = open_page("/keys")

    def made() -> int:
        with console.database.read() as session:
            return len(session.scalars(select(ApiKey.id)).all())

    before = made()
    page.get_by_label("Name").fill("pressed twice")
    page.get_by_role("button", name="Make key").dblclick()
    expect(page.locator("#secret")).to_be_visible()
    page.wait_for_load_state("networkidle")
    assert made() == before + 1
    page.get_by_label("Name").fill("and again")  # by Enter, which is no click
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator("#keys tr", has_text="and again")).to_have_count(1)
    page.wait_for_load_state("networkidle")
    assert made() == before + 2


def test_a_top_up_leads_to_stripe(console: Console, open_page: Open) -> None:
    """From the button to Stripe's page (which answers here), and from there back."""
    with fake_stripe() as stripe:
        stripe.reset(datetime.now(UTC))
        take_cards(console, stripe.settings().model_copy(update={"public_url": console.url}))
        page = open_page("/billing")
        page.route("https://checkout.example/**", lambda route: route.fulfill(body="pay here"))
        page.get_by_label("Dollars").fill("25.50")
        page.get_by_role("button", name="Pay by card").click()
        page.wait_for_url("https://checkout.example/**")
        (checkout,) = stripe.stripe.all("checkout.session")
        assert checkout["amount_total"] == 2550
        page.goto(
            next(form for _, path, form in stripe.front.requests if path == "/v1/checkout/sessions")["success_url"]
        )
        expect(page.get_by_role("heading", name="Billing")).to_be_visible()


def test_a_refusal_is_shown_on_the_page(console: Console, open_page: Open) -> None:
    page = open_page("/members", refusals=True)
    page.locator("#email").fill("owner@acme.example")
    with page.expect_response("**/console/members") as answer:
        page.get_by_role("button", name="Add", exact=True).click()
    assert answer.value.status == 400
    expect(page.locator("#toast")).to_contain_text("is a member already")


#: Whether the first chart has pixels of a colour.
PAINTED = """(colour) => {
  const canvas = document.querySelector(".chart canvas"), { width, height } = canvas;
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, width, height);
  const rgb = colour.match(/\\w\\w/g).map((part) => parseInt(part, 16));
  for (let at = 0; at < data.length; at += 4) if (rgb.every((part, i) => data[at + i] === part)) return true;
  return false;
}"""


def test_colours_can_be_chosen(open_page: Open) -> None:
    page = open_page(color_scheme="light")
    button = page.get_by_role("button", name="Colours")
    for colour, other in (("#4f5bd5", "#7f8af2"), ("#7f8af2", "#4f5bd5")):
        button.click()
        assert page.evaluate(PAINTED, colour)
        assert not page.evaluate(PAINTED, other)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    expect(button).to_have_text("Dark")


def test_filters_are_the_address(console: Console, open_page: Open) -> None:
    page = open_page("/usage?by=project")
    page.get_by_role("link", name="evals", exact=True).click()
    page.wait_for_url(f"**/console/usage?by=project&project={console.made.projects['evals']}")
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    text = Path(download.value.path()).read_text()
    assert set(line.split(",")[2] for line in text.splitlines()[1:]) == {"evals"}
