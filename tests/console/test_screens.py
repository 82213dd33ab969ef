"""Every page on a screen: it keeps its own Content-Security-Policy, is not cut off at 375 pixels or more, and is
readable for everybody (axe-core); and searching, comparing and writing notes work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, Page, Route, expect

from store.people.organisations import organisation_named
from tests.console.conftest import CHROMIUM, UNDRAWN, WATCH, Console, Open
from tests.console.provider import provider_process
from tests.console.screenshots import everywhere, sign_in_as_operator
from tests.console.sso import person, take_provider

pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"needs Chromium at {CHROMIUM}")

#: A telephone; a tablet upright, and on its side: both just above the width at which rows of tables become cards.
WIDTHS = (375, 768, 1024)
WIDE: Any = {"width": 1280, "height": 860}

#: What is cut off: all that is shown beyond the window, and every box that hides a part of itself to the right. Code
#: may scroll in its own box, and text may end in an ellipsis.
CUT = """() => {
  const found = [], shown = (el) => el.tagName + "." + el.className + " " + el.textContent.trim().slice(0, 40);
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page itself");
  for (const el of document.querySelectorAll("body *")) {
    if (el.closest("pre, dialog, .unseen, .skip, thead, #toast, .u-wrap, svg") || !el.checkVisibility()) continue;
    const box = el.getBoundingClientRect(), style = getComputedStyle(el);
    const hides = style.overflowX !== "visible" && style.textOverflow !== "ellipsis" && !el.matches("input, textarea");
    if (box.width && (box.right > innerWidth + 1 || box.left < -1)) found.push(Math.round(box.right) + " " + shown(el));
    else if (hides && el.clientWidth && el.scrollWidth > el.clientWidth + 1) found.push("hides " + shown(el));
  }
  return found.slice(0, 5);
}"""
#: Checks all rules, or those that are named.
AXE = """async (rules) => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"], ...rules });
  const bad = violations.filter((each) => ["serious", "critical"].includes(each.impact));
  const said = (node) => node.html.slice(0, 160) + " " + (node.any[0] ? node.any[0].message.slice(0, 160) : "");
  return bad.flatMap((each) => each.nodes.map((node) => each.id + ": " + said(node)));
}"""
IS_DARK = """() => {
  const [red, green, blue] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
  return red + green + blue < 200;
}"""
#: Charts follow their boxes one frame later.
FITTED = """() => new Promise((done) => {
  const fits = (el) => el.offsetWidth <= el.parentElement.clientWidth + 1;
  const all = () => [...document.querySelectorAll(".uplot")].every(fits);
  const look = (left) => (all() || !left ? done() : requestAnimationFrame(() => look(left - 1)));
  look(100);
})"""


@pytest.fixture(name="console")
def of_the_site(site: Console) -> Console:
    return site


@dataclass(frozen=True)
class Seen:
    """What is wrong with a page: what its policy forbids, or its browser complains of; cut off at some width; what axe
    says of it in light, and of its contrasts in dark."""

    refused: list[str]
    cut: list[str]
    light: list[str]
    dark: list[str]


def look(page: Page) -> Seen:
    expect(page.locator(UNDRAWN)).to_have_count(0)
    refused: list[str] = page.evaluate("window.violations")
    refused += [f"{chart} is hidden" for chart in page.locator(".chart canvas").all() if not chart.is_visible()]
    page.evaluate(AXE_SCRIPT)
    found = {}
    for scheme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        found[scheme] = page.evaluate(AXE, rules)
        if page.evaluate(IS_DARK) != (scheme == "dark"):
            found[scheme].append("the page is of the other colours")
    page.evaluate("document.querySelectorAll('main details').forEach((each) => { each.open = true; })")
    cut = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 780})
        page.evaluate(FITTED)
        cut += [f"at {width}: {each}" for each in page.evaluate(CUT)]
    page.set_viewport_size(WIDE)
    return Seen(refused, cut, found["light"], found["dark"])


@pytest.fixture(scope="module")
def seen(site: Console, browser: Browser) -> dict[str, Seen]:
    """Every page, looked at once, and the open search."""
    page, found, complaints = browser.new_page(viewport=WIDE, reduced_motion="reduce"), {}, list[str]()
    page.add_init_script(WATCH)
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    sign_in_as_operator(page, site)
    for path in everywhere(site):
        page.goto(f"{site.url}/console{path}")
        found[path] = look(page)
        found[path].refused.extend(complaints)
        complaints.clear()
    page.goto(f"{site.url}/console/nothing")
    found["/nothing"] = look(page)
    page.goto(f"{site.url}/console/runs")
    page.keyboard.press("Control+k")
    expect(page.locator("#found .hit").first).to_be_visible()
    found["search"] = look(page)
    page.goto(f"{site.url}/console/login")
    found["/login"] = look(page)
    page.close()
    return found | seen_with_a_provider(site, browser)


def seen_with_a_provider(site: Console, browser: Browser) -> dict[str, Seen]:
    """Pages of a member of two organisations who signs in by an OpenID provider, and of one whose link is unknown."""
    rules = [{"group": "both", "organisation": name, "role": "viewer"} for name in ("Acme Research", "Beta")]
    page, found = browser.new_page(viewport=WIDE, reduced_motion="reduce"), {}
    page.add_init_script(WATCH)
    site.database.write_now(lambda session: organisation_named(session, "Beta"))
    with provider_process() as issuer, without_a_change(site):
        take_provider(site, issuer, public_url=site.url, groups=rules)
        person(issuer, "dora", groups=["both"])
        page.goto(f"{site.url}/console/login")
        found["/login, with a provider"] = look(page)
        page.get_by_role("button", name="Sign in with Corp").click()
        page.locator("input[name=sub]").fill("dora")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading")).to_have_text("Which organisation?")
        found["/sso, to choose"] = look(page)
        page.goto(f"{site.url}/console/sso/callback")
        expect(page.get_by_role("main")).to_contain_text("was not begun in this browser")
        found["/sso, refused"] = look(page)
        page.goto(f"{site.url}/console/join/nothing")
        found["/join, of nothing"] = look(page)
    page.close()
    return found


@contextmanager
def without_a_change(site: Console) -> Iterator[None]:
    """Give the service back its settings afterwards, as other tests use it."""
    service = site.app.state.service
    try:
        yield
    finally:
        site.app.state.service = service


@pytest.mark.parametrize("what", ["refused", "cut", "light", "dark"])
def test_every_page_keeps_the_policy_and_is_neither_cut_off_nor_hard_to_read(seen: dict[str, Seen], what: str) -> None:
    assert {path: getattr(page, what) for path, page in seen.items() if getattr(page, what)} == {}


def test_look_finds_what_is_wrong_with_a_page(open_page: Open) -> None:
    """Otherwise the test above could not fail."""
    page = open_page("/keys", viewport=WIDE)
    page.evaluate("document.querySelector('main h1').textContent = 'x'.repeat(200)")
    page.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<input>')")
    page.evaluate("Object.assign(document.querySelector('main h1').style, { color: '#777', background: '#888' })")
    found = look(page)
    assert any("H1" in one for one in found.cut)
    assert any(one.startswith("label") for one in found.light)
    assert any(one.startswith("color-contrast") for one in found.dark)


def test_search_by_keyboard(console: Console, open_page: Open) -> None:
    page = open_page("/billing")
    page.keyboard.press("Control+k")
    expect(page.locator("#search-text")).to_be_focused()
    expect(page.locator(".hit").first).to_contain_text("Overview")
    page.keyboard.type("GRPO")
    expect(page.locator(".hit")).to_have_count(6)
    expect(page.locator(".hit[aria-selected=true]")).to_have_id("hit-0")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#search-text")).to_have_attribute("aria-activedescendant", "hit-1")
    chosen = page.locator("#hit-1").get_attribute("href")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**{chosen}")
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    expect(page.locator("#search-box")).to_be_hidden()
    page.get_by_role("button", name="Search").first.click()
    page.keyboard.type("<b>nobody</b>")
    expect(page.locator("#found")).to_have_text(re.compile("Nothing is called “<b>nobody</b>”"))


def test_a_search_takes_the_place_of_a_slower_one(console: Console, open_page: Open) -> None:
    page = open_page("/billing")
    page.route(re.compile(r"/search\?q=$"), lambda route: None)  # never answered
    with page.expect_request("**/console/search?q="):
        page.keyboard.press("Control+k")
    with page.expect_event("requestfailed"):
        page.keyboard.type("GRPO")
    expect(page.locator(".hit")).to_have_count(6)


def test_runs_are_chosen_and_compared(console: Console, open_page: Open) -> None:
    page = open_page("/runs")
    button = page.get_by_role("button", name="Compare", exact=True)
    expect(button).to_be_disabled()
    for title in ("gsm8k-grpo", "tool-use-grpo"):
        page.get_by_label(f"Compare {title}").check()
    with page.expect_response("**/console/runs"):  # the page does this every ten seconds; the choice stays
        page.evaluate("htmx.ajax('GET', '/console/runs', { source: '#runs', target: '#runs' })")
    expect(page.get_by_label("Compare gsm8k-grpo")).to_be_checked()
    button.click()
    page.wait_for_url("**/console/compare?run=*&run=*")
    expect(page.locator("[data-curve=reward] canvas")).to_be_visible()
    page.get_by_role("button", name="Cost", exact=True).click()
    chart = page.locator("[data-curve=reward] .chart")
    chart.hover(position={"x": 260, "y": 90})
    expect(chart.locator(".tip")).to_contain_text("gsm8k-grpo")
    expect(chart.locator(".tip")).to_contain_text("tool-use-grpo")


def test_notes_are_written(console: Console, open_page: Open) -> None:
    page = open_page(f"/runs/{console.made.runs[1]}")
    page.get_by_label("Notes").fill("<b>worse</b> than before\nwhy?")
    page.get_by_role("button", name="Keep notes").click()
    expect(page.locator("#toast")).to_have_text("Notes kept")
    expect(page.get_by_label("Notes")).to_have_value("<b>worse</b> than before\nwhy?")


@pytest.mark.parametrize("path", ["/runs/{0}", "/compare?run={0}&run={1}"])
def test_a_failed_load_is_shown_and_tried_again_soon(console: Console, open_page: Open, path: str) -> None:
    page = open_page("/keys", refusals=True)
    failures = [503, 500, None]

    def fail(route: Route) -> None:
        if not failures:
            route.continue_()
        elif status := failures.pop(0):
            route.fulfill(status=status)
        else:
            route.abort()

    page.route(re.compile("/live$|/compare/curves"), fail)
    page.clock.install(time=0)
    page.clock.pause_at(1)
    page.goto(f"{console.url}/console" + path.format(console.made.runs[0], console.made.runs[3]))
    for pause_ms, said in ((1000, "answered 503"), (2000, "answered 500"), (4000, "cannot be reached")):
        expect(page.locator("#behind")).to_contain_text(said)
        page.clock.run_for(pause_ms)
    page.clock.resume()
    expect(page.locator("[data-curve=reward] canvas")).to_be_visible()
    expect(page.locator("#behind")).to_be_hidden()
    assert failures == []
