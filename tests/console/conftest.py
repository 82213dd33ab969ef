"""The console over a real database and journal, seeded: one for a client in process, one for a browser."""

from __future__ import annotations

import copy
import re
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright
from starlette.testclient import TestClient

from api.server.app import front
from api.state.service import Service
from billing.metering.charges import Charge, settle
from billing.money.accounts import Payer
from billing.prices import load_prices
from migrations.upgrade import migrate
from scheduler.journal.journal import Journal
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from store.settings import PaymentsSettings, Settings
from tests.console.seed import MODEL, Seeded, seed
from workers.model.card import read_card
from workers.model.tiny import TINY_PATH

SAME_SITE = {"sec-fetch-site": "same-origin"}
CHROMIUM = "/usr/bin/chromium"
#: The page itself keeps violations of the policy, from before its first script.
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (e) => violations.push(e.violatedDirective + " " + e.blockedURI), true);
"""
#: How long a test waits for a page while other tests use the processor, too. `expect` ignores the context's limit, and
#: waits five seconds unless it is told.
PATIENCE_MS = 60_000
#: Parts of the page that are not drawn yet.
UNDRAWN = ".chart:not(:has(canvas)), [aria-busy=true]"
Open = Callable[..., Page]


class Console:
    """A seeded console, with methods that sign in a person of a role."""

    def __init__(self, app: FastAPI, database: Database, made: Seeded, client: Any = None, url: str = "") -> None:
        self.app = app
        self.database = database
        self.made = made
        self.http = client
        self.url = url

    def sign_in(self, role: str = "owner") -> httpx.Response:
        self.http.cookies.clear()
        body = {"key": self.made.keys[role]}
        reply: httpx.Response = self.http.post("/console/login", data=body, headers=SAME_SITE, follow_redirects=False)
        return reply

    def cookie(self, role: str) -> dict[str, str]:
        """The cookie of a browser in which somebody has signed in."""
        name = "weft_console"
        self.sign_in(role)
        value = self.http.cookies[name]
        self.http.cookies.clear()
        return {"name": name, "value": value, "url": self.url}

    def get(self, path: str, status: int = 200) -> str:
        reply = self.http.get(f"/console{path}", headers={"accept": "text/html"}, follow_redirects=False)
        assert reply.status_code == status, reply.text[:500]
        return str(reply.text)

    def csrf(self) -> str:
        found = re.search(r'"X-CSRF-Token": "(\w+)"', self.get("/runs"))
        assert found is not None
        return found.group(1)

    def press(self, action: str, /, status: int = 200, **form: Any) -> httpx.Response:
        """Send what a button sends."""
        headers = {**SAME_SITE, "hx-request": "true", "x-csrf-token": self.csrf()}
        reply: httpx.Response = self.http.post(f"/console{action}", data=form, headers=headers, follow_redirects=False)
        assert reply.status_code == status, reply.text[:500]
        return reply

    def api(self, path: str, role: str = "owner") -> Any:
        reply = self.http.get(f"/api/v1/{path}", headers={"x-api-key": self.made.keys[role]})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def bill(self, run_id: str, tokens: int) -> None:
        """Charge the organisation for tokens that a run has trained."""
        now = datetime.now(UTC)
        payer = Payer(self.made.org_id)
        name = f"op-{time.monotonic_ns()}"
        charge = Charge(payer, run_id.split(":")[0], run_id, name, MODEL, now, {"train": tokens}, None)
        self.database.write_now(lambda session: settle(session, [charge], load_prices(), now))


def take_cards(console: Console, payments: PaymentsSettings) -> None:
    """Let this console take cards from now on."""
    service = console.app.state.service
    settings = service.settings.model_copy(update={"payments": payments})
    console.app.state.service = replace(service, settings=settings)


def application(folder: Path, database: Database) -> FastAPI:
    settings = Settings(data_dir=folder, long_poll_s=0.2)
    prices = load_prices()
    journal = Journal(database, FolderBlobs(folder / "blobs"), prices, 50)
    cards = {MODEL: read_card(MODEL, TINY_PATH)}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = Service(
            settings, cards, database, FolderBlobs(folder / "blobs"), prices, journal, lambda: {"queue": {}}
        )
        yield
        await journal.flush()

    return front(lifespan)


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seeded]:
    """A seeded database, to be copied."""
    path = tmp_path_factory.mktemp("seeded") / "weft.db"
    database = Database(f"sqlite:///{path}")
    migrate(database)
    made = database.write_now(lambda session: seed(session, load_prices(), days=9))
    database.close()
    return path, made


@pytest.fixture
def console(tmp_path: Path, seeded: tuple[Path, Seeded]) -> Iterator[Console]:
    shutil.copy(seeded[0], tmp_path / "weft.db")
    database = Database(f"sqlite:///{tmp_path}/weft.db")
    app = application(tmp_path, database)
    with TestClient(app) as http:
        yield Console(app, database, copy.deepcopy(seeded[1]), http)
    database.close()


@contextmanager
def served(folder: Path, days: int = 30, tidy: bool = False) -> Iterator[Console]:
    """A seeded console at an address; `tidy`: without hostile names, to be looked at."""
    database = Database(f"sqlite:///{folder}/weft.db")
    migrate(database)
    made = database.write_now(lambda session: seed(session, load_prices(), days=days, tidy=tidy))
    app = application(folder, database)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 60
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.started
        with httpx.Client(base_url=url) as client:
            yield Console(app, database, made, client, url)
        server.should_exit = True
        thread.join(30)
    database.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """One served console for all tests with a browser."""
    with served(tmp_path_factory.mktemp("console"), days=9) as console:
        yield console


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for one module only, because its event loop would disturb tests with loops of their own."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


#: What htmx logs as errors where one request takes another's place (`hx-sync`), or a page is left: the fault of nobody.
TAKEN_BACK = ("htmx:afterRequest, ", "htmx:sendAbort, ")


def complains(message: ConsoleMessage) -> bool:
    return message.type in ("error", "warning") and not message.text.startswith(TAKEN_BACK)


def watched(browser: Browser, **options: Any) -> BrowserContext:
    context = browser.new_context(reduced_motion="reduce", **options)
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(WATCH)
    return context


@pytest.fixture(scope="module")
def owners(browser: Browser, site: Console) -> Iterator[BrowserContext]:
    """A browser in which the owner has signed in, and which caches what pages load. A test that changes what
    the browser stores opens its page with options, and so in another browser."""
    context = watched(browser)
    context.add_cookies([site.cookie("owner")])  # type: ignore[list-item]
    yield context
    context.close()


@pytest.fixture
def open_page(browser: Browser, site: Console, owners: BrowserContext) -> Iterator[Open]:
    """Opens pages, signed in; at the end no page may have violated its policy, thrown an error or logged one."""
    contexts: list[BrowserContext] = []
    wrong: list[str] = []
    pages: list[Page] = []

    def open_page(path: str = "/", role: str | None = "owner", refusals: bool = False, **options: Any) -> Page:
        context = owners
        if options or refusals or role != "owner":
            context = watched(browser, **options)
            contexts.append(context)
            if role is not None:
                context.add_cookies([site.cookie(role)])  # type: ignore[list-item]
        page = context.new_page()
        if not refusals:  # a browser complains of every 4xx
            page.on("console", lambda m: wrong.append(m.text) if complains(m) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        pages.append(page)
        if role is not None:
            page.goto(f"{site.url}/console{path}")
        return page

    yield open_page
    for page in pages:
        wrong += page.evaluate("window.violations")
        page.close()
    for context in contexts:
        context.close()
    assert wrong == []
