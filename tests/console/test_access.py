"""Who is let in, who stays signed in, and who may press which button."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session
from starlette.datastructures import URL
from starlette.requests import Request

from api.console import sessions
from api.console.security import CSP
from store.people import organisations
from store.people.keys import revoke
from store.people.secret import digest
from store.tables import ApiKey, AuditEntry, BrowserSession, Checkpoint, LoginLink, User
from tests.console.conftest import SAME_SITE, Console

PAGES = ("/", "/usage", "/usage.csv", "/runs", "/checkpoints", "/audit", "/runs/x", "/runs/x/live")
#: Pages that not everybody may see, and the roles that may.
CLOSED = {"/audit": {"owner"}, "/usage": {"owner", "viewer"}, "/usage.csv": {"owner", "viewer"}}


def age(console: Console, **back: timedelta) -> None:
    """Make the session look older than it is."""
    now = datetime.now(UTC)
    values = {name: now - passed for name, passed in back.items()}
    console.database.write_now(lambda session: session.execute(update(BrowserSession).values(**values)))


def test_signing_in_and_out(console: Console) -> None:
    reply = console.sign_in()
    assert (reply.status_code, reply.headers["location"]) == (303, "/console/")
    assert "Acme Research" in console.get("/")
    console.press("/logout", status=204)
    reply = console.http.get("/console/", headers={"accept": "text/html"}, follow_redirects=False)
    assert (reply.status_code, reply.headers["location"]) == (303, "/console/login?next=%2Fconsole%2F")


@pytest.mark.parametrize("by_link", [False, True])
def test_signing_in_again_ends_the_session_before(console: Console, by_link: bool) -> None:
    """The browser forgets it, so nobody could sign out of it: a thief of its cookie would keep it for a day."""
    console.sign_in()
    before = console.http.cookies["weft_console"]
    path, made = "/console/login", console.made
    if by_link:
        path += "/" + console.database.write_now(lambda s: sessions.new_link(s, made.org_id, made.users["owner"]))
    refused = console.http.post("/console/login", data={"key": "tml-wrong"}, headers=SAME_SITE)
    assert refused.status_code == 401
    assert "Acme Research" in console.get("/")  # a failed sign-in changes nothing about who is signed in
    form = {"key": made.keys["owner"]}
    assert console.http.post(path, data=form, headers=SAME_SITE, follow_redirects=False).status_code == 303
    now = console.http.cookies["weft_console"]
    console.http.cookies.clear()
    for cookie, status in ((before, 303), (now, 200)):
        console.http.cookies.set("weft_console", cookie)
        console.get("/", status)
        console.http.cookies.clear()


def test_a_bad_key_is_refused_without_saying_why(console: Console) -> None:
    for key in ("tml-nothing", "", " ", "x" * 300):
        reply = console.http.post("/console/login", data={"key": key}, headers=SAME_SITE)
        assert reply.status_code in (401, 422)
        assert "set-cookie" not in reply.headers


def test_no_large_bodies(console: Console) -> None:
    big = b"key=" + b"x" * 70_000
    for content in (big, iter([big])):
        reply = console.http.post("/console/login", content=content, headers=SAME_SITE)
        assert reply.status_code == 413
        assert "content-security-policy" in reply.headers


@pytest.mark.parametrize("path", PAGES)
def test_nothing_without_a_session(console: Console, path: str) -> None:
    assert console.http.get(f"/console{path}", follow_redirects=False).status_code == 401
    console.http.cookies.set("weft_console", "guess")
    assert console.http.get(f"/console{path}", follow_redirects=False).status_code == 401
    part = console.http.get(f"/console{path}", headers={"hx-request": "true"})
    assert part.headers["hx-redirect"].startswith("/console/login?next=")


@pytest.mark.parametrize(
    "to", ["https://evil.example/", "//evil.example", "/console/\\evil", "/api/v1/x", "javascript:1"]
)
def test_signing_in_leads_nowhere_else(console: Console, to: str) -> None:
    body = {"key": console.made.keys["owner"], "next": to}
    reply = console.http.post("/console/login", data=body, headers=SAME_SITE, follow_redirects=False)
    assert reply.headers["location"] == "/console/"


def test_the_cookie(console: Console) -> None:
    cookie = console.sign_in().headers["set-cookie"]
    assert cookie.startswith("weft_console=")
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    body = {"key": console.made.keys["owner"]}
    secure = console.http.post("https://testserver/console/login", data=body, headers=SAME_SITE, follow_redirects=False)
    cookie = secure.headers["set-cookie"]
    assert cookie.startswith("__Host-weft_console=")
    assert {"Secure", "HttpOnly", "Path=/"} <= set(cookie.split("; "))
    assert "Domain" not in cookie


def test_only_a_hash_of_the_session_is_kept(console: Console) -> None:
    console.sign_in()
    sid = console.http.cookies["weft_console"]
    with console.database.read() as session:
        (row,) = session.scalars(select(BrowserSession))
    assert row.sid_sha256 == digest(sid)
    assert sid not in str(vars(row))
    console.sign_in()
    assert console.http.cookies["weft_console"] != sid


def test_headers(console: Console) -> None:
    for path in ("/console/login", "/console/nowhere", "/console/static/console.css", "/console/usage"):
        headers = console.http.get(path).headers
        assert headers["content-security-policy"] == CSP
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
    assert console.http.get("/console/login").headers["cache-control"] == "no-store"
    assert "content-security-policy" not in console.http.get("/api/v1/healthz").headers
    assert "unsafe" not in CSP


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-csrf-token": "0" * 64},
        {"x-csrf-token": "right", "sec-fetch-site": "cross-site"},
        {"x-csrf-token": "right", "sec-fetch-site": "same-site"},
        {"x-csrf-token": "right", "origin": "https://evil.example"},
    ],
)
def test_other_sites_press_no_buttons(console: Console, headers: dict[str, str]) -> None:
    console.sign_in()
    sent = {name: console.csrf() if value == "right" else value for name, value in headers.items()}
    reply = console.http.post("/console/logout", headers=sent)
    assert reply.status_code == 403
    console.get("/")


def test_other_sites_sign_nobody_in(console: Console) -> None:
    body = {"key": console.made.keys["owner"]}
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}):
        assert console.http.post("/console/login", data=body, headers=headers).status_code == 403


def test_what_is_no_url_is_no_site_and_no_page(console: Console) -> None:
    body = {"key": console.made.keys["owner"]}
    assert console.http.post("/console/login", data=body, headers={"origin": "http://["}).status_code == 403
    reply = console.http.get("/console/", headers={"hx-request": "true", "hx-current-url": "http://["})
    assert (reply.status_code, "next=" in reply.headers["hx-redirect"]) == (401, True)
    assert console.http.get("/console/login", params={"next": "//["}).status_code == 200


def test_a_part_leads_back_to_its_page_with_its_filters(console: Console) -> None:
    headers = {"hx-request": "true", "hx-current-url": "http://testserver/console/runs?state=live&page=2"}
    to = console.http.get("/console/runs?page=2", headers=headers).headers["hx-redirect"]
    assert httpx.URL(to).params["next"] == "/console/runs?state=live&page=2"


def test_a_token_is_of_one_session(console: Console) -> None:
    console.sign_in("member")
    token = console.csrf()
    console.sign_in("owner")
    assert console.csrf() != token
    reply = console.http.post("/console/logout", headers={**SAME_SITE, "x-csrf-token": token})
    assert reply.status_code == 403


class TestTheEnd:
    def test_of_an_idle_session(self, console: Console) -> None:
        console.sign_in()
        age(console, last_seen_at=sessions.IDLE - timedelta(minutes=1))
        console.get("/")  # which counts as use
        age(console, last_seen_at=sessions.IDLE)
        console.get("/", status=303)

    def test_of_an_old_session(self, console: Console) -> None:
        console.sign_in()
        age(console, expires_at=timedelta(0))
        console.get("/", status=303)

    def test_use_is_noted(self, console: Console) -> None:
        console.sign_in()
        age(console, last_seen_at=timedelta(minutes=5))
        console.get("/")
        with console.database.read() as session:
            (row,) = session.scalars(select(BrowserSession))
        assert datetime.now(UTC) - row.last_seen_at < timedelta(minutes=4)

    def test_with_the_key(self, console: Console) -> None:
        console.sign_in("member")
        console.database.write_now(lambda session: revoke(session, console.made.keys["member"]))
        console.get("/", status=303)

    def test_with_the_membership(self, console: Console) -> None:
        made = console.made
        console.sign_in("viewer")
        console.database.write_now(
            lambda session: organisations.remove_member(session, made.org_id, made.users["viewer"])
        )
        console.get("/", status=303)

    def test_stays_one_when_they_are_a_member_again(self, console: Console) -> None:
        """A member whose laptop was stolen was removed and is added again: the laptop's session stays ended."""
        made, viewer = console.made, console.made.users["viewer"]

        def again(session: Session) -> None:
            organisations.remove_member(session, made.org_id, viewer)
            organisations.add_member(session, made.org_id, session.get_one(User, viewer).email, "viewer")

        links = [
            console.database.write_now(lambda session: sessions.new_link(session, made.org_id, viewer))
            for _ in range(2)
        ]
        first, second = (f"/console/login/{link}" for link in links)
        assert console.http.post(first, headers=SAME_SITE, follow_redirects=False).status_code == 303
        console.get("/")
        console.database.write_now(again)
        console.get("/", status=303)
        assert console.http.post(second, headers=SAME_SITE, follow_redirects=False).status_code == 401

    def test_a_role_that_changes(self, console: Console) -> None:
        made = console.made
        console.sign_in("viewer")
        console.get("/audit", status=403)
        user = made.users["viewer"]
        console.database.write_now(lambda session: organisations.change_role(session, made.org_id, user, "admin"))
        console.get("/audit")


def test_nobody_signs_others_out_by_signing_in_often(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a leaked key of few rights could keep out those who would revoke it. Each person's oldest give way."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    console.sign_in("viewer")
    first = dict(console.http.cookies)
    console.sign_in("owner")
    owners = dict(console.http.cookies)
    for _ in range(4):
        console.sign_in("viewer")
    console.get("/")
    with console.database.read() as session:
        assert session.query(BrowserSession).count() == 3 + 1
    for cookies, status in (owners, 200), (first, 303):
        console.http.cookies.clear()
        console.http.cookies.update(cookies)
        console.get("/", status)


@pytest.mark.parametrize("page", ["/login/{}", "/join/{}"])
def test_no_secret_of_a_link_is_logged_when_something_breaks(
    console: Console, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, page: str
) -> None:
    """The operator's log says which page broke, and holds no secret by which its reader could sign in."""

    def broken(*_: Any) -> None:
        raise RuntimeError("nobody expected this")

    monkeypatch.setattr(type(console.app.state.service), "read", broken)
    secret = "Zx9" * 10
    reply = console.http.post(f"/console{page.format(secret)}", headers=SAME_SITE)
    if reply.status_code != 500:  # a POST that only writes does not break
        reply = console.http.get(f"/console{page.format(secret)}")
    assert reply.status_code == 500
    theirs = [record for record in caplog.records if record.name not in ("httpx", "httpx2")]  # this test's client
    logged = "\n".join(map(caplog.handler.format, theirs))
    assert page.partition("{")[0] in logged
    assert secret not in logged


class TestLinks:
    def link(self, console: Console, role: str = "billing-admin", operator: bool = False) -> str:
        made = console.made
        return str(
            console.database.write_now(
                lambda session: sessions.new_link(session, made.org_id, made.users[role], operator=operator)
            )
        )

    def enter(self, console: Console, token: str) -> int:
        reply = console.http.post(f"/console/login/{token}", headers=SAME_SITE, follow_redirects=False)
        return int(reply.status_code)

    def test_signs_in_once(self, console: Console) -> None:
        token = self.link(console)
        for _ in range(2):  # looking alone uses nothing up
            assert token in console.get(f"/login/{token}")
        assert self.enter(console, token) == 303
        assert "billing-admin@acme.example" in console.get("/")
        console.http.cookies.clear()
        assert self.enter(console, token) == 401
        with console.database.read() as session:
            (row,) = session.scalars(select(LoginLink))
            (entry,) = session.scalars(select(AuditEntry).filter_by(event="console_signed_in"))
        assert token not in str(vars(row))
        assert entry.actor == f"user:{console.made.users['billing-admin']}"

    def test_not_for_long(self, console: Console) -> None:
        token = self.link(console)
        past = datetime.now(UTC) - timedelta(seconds=1)
        console.database.write_now(lambda session: session.execute(update(LoginLink).values(expires_at=past)))
        assert self.enter(console, token) == 401

    def test_not_for_who_has_left(self, console: Console) -> None:
        token, made = self.link(console), console.made
        user = made.users["billing-admin"]
        console.database.write_now(lambda session: organisations.remove_member(session, made.org_id, user))
        assert self.enter(console, token) == 401

    def test_not_from_elsewhere(self, console: Console) -> None:
        token = self.link(console)
        reply = console.http.post(f"/console/login/{token}", headers={"sec-fetch-site": "cross-site"})
        assert reply.status_code == 403

    def test_operators_see_the_service(self, console: Console) -> None:
        self.enter(console, self.link(console, "owner"))
        assert "Cost of ownership" not in console.get("/")
        console.http.cookies.clear()
        self.enter(console, self.link(console, "owner", operator=True))
        assert "Cost of ownership" in console.get("/")
        assert "limits.sample_days" in console.get("/ownership?days=91", status=400)


class TestRoles:
    @pytest.mark.parametrize("role", ["owner", "member", "viewer"])
    def test_pages(self, console: Console, role: str) -> None:
        console.sign_in(role)
        for path in ("/", "/usage", "/usage.csv", "/runs", "/checkpoints", f"/runs/{console.made.runs[0]}", "/audit"):
            console.get(path, status=200 if role in CLOSED.get(path, {role}) else 403)

    def test_members_do_not_see_the_wallet(self, console: Console) -> None:
        console.sign_in("member")
        page = console.get("/")
        assert "Balance" not in page
        assert "Cost per day" not in page
        console.get(f"/usage?run={console.made.runs[0]}&by=kind")  # one run's, as in the API
        console.get("/usage?run=-", status=403)
        console.sign_in("viewer")
        assert "Balance" in console.get("/")

    def test_members_find_no_colleagues_keys_and_addresses(self, console: Console) -> None:
        """On the page of the costs of their runs: keys are numbered, so a member could ask for every one."""
        with console.database.read() as session:
            others = {key.id: key.prefix for key in session.scalars(select(ApiKey)) if "member" not in key.name}
        assert len(others) > 1
        console.sign_in("member")
        user, run = console.made.users["owner"], console.made.runs[0]
        for view in ("usage", "usage.csv"):
            for asked in (*(f"key={number}" for number in others), f"user={user}", "by=key", "by=user"):
                shown = console.get(f"/{view}?run={run}&{asked}")
                assert not [prefix for prefix in others.values() if prefix in shown], asked
                assert "@acme.example" not in shown.replace("member@acme.example", ""), asked

    def test_viewers_only_look(self, console: Console) -> None:
        path = f"tinker://{console.made.runs[0]}/weights/step-200"
        console.sign_in("viewer")
        assert "checkpoints/delete" not in console.get("/checkpoints")
        for action, form in (("delete", {}), ("ttl", {"days": 1})):
            reply = console.press(f"/checkpoints/{action}", status=403, path=path, **form)
            assert "checkpoints:write" in reply.text
        console.sign_in("member")
        console.press("/checkpoints/delete", path=path)
        with console.database.read() as session:
            assert not list(session.scalars(select(Checkpoint).filter_by(id="checkpoint-0-200")))

    @pytest.mark.parametrize("role", ["owner", "viewer"])
    def test_nothing_of_others(self, console: Console, role: str) -> None:
        console.sign_in(role)
        foreign = "rival-session:train:0"
        for path in (f"/runs/{foreign}", f"/runs/{foreign}/live"):
            console.get(path, status=404)
        for path in ("/", "/usage?by=run&days=90", "/runs", "/usage.csv?by=run", f"/usage?by=model&run={foreign}"):
            page = console.get(path)
            assert "rival-secret-run" not in page
            assert "49.38" not in page
        if role == "owner":
            path = f"tinker://{foreign}/weights/step-100"
            console.press("/checkpoints/delete", status=404, path=path)


def test_a_suspended_organisation_sees_only_its_bills(console: Console) -> None:
    from store.tables import Organisation

    def suspend(session: Any) -> None:
        organisations.set_status(session, session.get_one(Organisation, console.made.org_id), "suspended")

    console.sign_in()
    console.database.write_now(suspend)
    refused = console.get("/", status=403)
    assert "suspended" in refused
    assert 'href="/console/billing"' in refused  # the page after sign-in links to the bills


def test_a_host_header_shows_a_suspended_organisation_no_more(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older Starlettes put the Host header into the path, so that it could name a page that is allowed."""
    from store.tables import Organisation

    def suspend(session: Any) -> None:
        organisations.set_status(session, session.get_one(Organisation, console.made.org_id), "suspended")

    def url(request: Request) -> URL:
        host = dict(request.scope["headers"]).get(b"host", b"").decode("latin1")
        return URL(f"http://{host}{request.scope['path']}")

    console.sign_in()
    console.database.write_now(suspend)
    monkeypatch.setattr(Request, "url", property(url))
    host = "testserver/console/billing?"
    reply = console.http.get("/console/runs", headers={"host": host, "accept": "text/html"}, follow_redirects=False)
    assert reply.status_code == 403
    assert console.http.get("/console/billing", headers={"host": "testserver"}).status_code == 200
