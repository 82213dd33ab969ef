"""Keys, members and projects: the console's buttons keep the API's rules."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.responses import HTMLResponse
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from api.console import render, sessions
from store.people.keys import new_key
from store.tables import ApiKey, AuditEntry, BrowserSession, LoginLink, Membership, Project
from tests.console.conftest import SAME_SITE, Console


def key_named(console: Console, name: str) -> ApiKey:
    with console.database.read() as session:
        return session.scalars(select(ApiKey).filter_by(name=name)).one()


def works(console: Console, secret: str) -> bool:
    reply = console.http.get("/api/v1/weft/limits", headers={"x-api-key": secret})
    return bool(reply.status_code == 200)


def secret_in(page: str) -> str:
    found = re.search(r'<code id="secret">([^<]+)<', page)
    assert found is not None
    return found.group(1)


class TestKeys:
    def test_made_rotated_revoked(self, console: Console) -> None:
        console.sign_in()
        page = console.press("/keys", name="cluster", scopes=["train", "sample"], days=30)
        secret = secret_in(page.text)
        assert page.headers["cache-control"] == "no-store"
        row = key_named(console, "cluster")
        assert (row.scopes, row.user_id) == (["sample", "train"], None)
        assert row.expires_at is not None
        assert abs(row.expires_at - datetime.now(UTC) - timedelta(days=30)) < timedelta(minutes=5)
        assert works(console, secret)
        assert secret not in console.get("/keys")
        another = secret_in(console.press(f"/keys/{row.id}/rotate").text)
        assert another != secret
        assert works(console, another)
        assert works(console, secret)  # for a day
        console.press(f"/keys/{row.id}/revoke")
        assert key_named(console, "cluster").revoked_at is not None
        assert "revoked or expired" in console.get("/keys")
        assert another not in console.get("/audit")

    def test_members_have_their_own(self, console: Console) -> None:
        console.sign_in("member")
        page = console.get("/keys")
        assert "member&#39;s laptop" in page
        assert "owner&#39;s laptop" not in page
        assert "Belongs to" not in page
        console.press("/keys", name="mine", scopes=["train"])
        assert key_named(console, "mine").user_id == console.made.users["member"]
        more = secret_in(console.press("/keys", name="more", scopes=["admin"]).text)  # all that a member may, no more
        assert console.http.get("/api/v1/audit", headers={"x-api-key": more}).status_code == 403
        owners = key_named(console, "owner's laptop").id
        for action in ("rotate", "revoke"):
            console.press(f"/keys/{owners}/{action}", status=404)

    def test_not_those_of_others(self, console: Console) -> None:
        console.sign_in()
        rival = key_named(console, "rival").id
        for action in ("rotate", "revoke"):
            console.press(f"/keys/{rival}/{action}", status=404)
        assert key_named(console, "rival").revoked_at is None

    def test_mistakes(self, console: Console) -> None:
        console.sign_in()
        console.press("/keys", status=422, name="none", scopes=[])
        console.press("/keys", status=422, name="bad", scopes=["everything"])
        console.press("/keys", status=404, name="bad", scopes=["train"], user_id="nobody")

    def test_not_after_a_while(self, console: Console) -> None:
        """A stranger at an open browser makes no keys: after a while they need a new sign-in."""
        console.sign_in()
        past = datetime.now(UTC) - sessions.FRESH
        console.database.write_now(lambda session: session.execute(update(BrowserSession).values(created_at=past)))
        reply = console.press("/keys", status=401, name="late", scopes=["train"])
        assert reply.headers["hx-redirect"].startswith("/console/login?next=")
        console.get("/keys")
        with console.database.read() as session:
            assert not session.scalars(select(ApiKey).filter_by(name="late")).all()


class TestReach:
    """A session may do no more than the key or link that opened it (`api.who.reach`)."""

    def test_opened_with_a_key_that_ends(self, console: Console) -> None:
        """The session ends with the key, and cannot make a key, a link or a role that lasts longer."""
        made, until = console.made, datetime.now(UTC) + timedelta(hours=1)

        def write(session: Session) -> str:
            return new_key(session, made.org_id, user_id=made.users["owner"], expires_at=until)[1]

        made.keys["ending"] = console.database.write_now(write)
        console.sign_in("ending")
        with console.database.read() as session:
            assert session.scalars(select(BrowserSession)).one().expires_at == until
        owners = key_named(console, "owner's laptop").id
        user = made.users["viewer"]
        for action, form in (
            ("/keys", {"name": "for ever", "scopes": ["admin"]}),
            (f"/keys/{owners}/rotate", {}),
            (f"/keys/{owners}/revoke", {}),
            (f"/members/{user}/link", {}),
            (f"/members/{user}/role", {"role": "owner"}),
            (f"/members/{user}/remove", {}),
            ("/members", {"email": "thief@acme.example", "role": "owner"}),
        ):
            assert "expiry: it has no end" in console.press(action, status=403, **form).text, action
        with console.database.read() as session:
            assert not session.scalars(select(LoginLink)).all()

    def test_opened_with_a_secret_that_was_rotated_away(self, console: Console) -> None:
        console.sign_in()
        row = key_named(console, "owner's laptop")
        console.press(f"/keys/{row.id}/rotate")
        console.sign_in()
        assert "expiry: " in console.press("/keys", status=403, name="for ever", scopes=["admin"]).text

    def test_by_a_link_that_a_colleague_made(self, console: Console) -> None:
        """The colleague could have used the link: every audit entry says so, until the person signs in another way."""
        made, user = console.made, console.made.users["viewer"]
        console.sign_in()
        console.press(f"/members/{user}/role", role="admin")
        link = secret_in(console.press(f"/members/{user}/link").text)
        console.http.cookies.clear()
        console.http.post(link.removeprefix("http://testserver"), headers=SAME_SITE, follow_redirects=False)
        console.press("/projects", name="theirs")
        with console.database.read() as session:
            entries = session.scalars(select(AuditEntry).order_by(AuditEntry.id)).all()[-2:]
        assert [(row.event, row.actor, row.detail["link_by"]) for row in entries] == [
            ("console_signed_in", f"user:{user}", f"user:{made.users['owner']}"),
            ("project_created", f"user:{user}", f"user:{made.users['owner']}"),
        ]

    def test_what_such_a_session_gives_out_is_the_colleagues(self, console: Console) -> None:
        """Nobody knows whether these keys are theirs alone: the colleague could have used either link."""
        made, user = console.made, console.made.users["viewer"]
        console.sign_in()
        console.press(f"/members/{user}/role", role="admin")
        for name in ("first", "second"):
            link = secret_in(console.press(f"/members/{user}/link").text)
            console.http.post(link.removeprefix("http://testserver"), headers=SAME_SITE, follow_redirects=False)
            console.press("/keys", name=name, user_id=user, scopes=["admin"])
            row = key_named(console, name)
            assert (row.user_id, row.given_to) == (user, f"user:{made.users['owner']}")


class TestMembers:
    def test_added_changed_removed(self, console: Console) -> None:
        console.sign_in()
        console.press("/members", email="new@acme.example", role="viewer")
        assert "new@acme.example" in console.get("/members")
        with console.database.read() as session:
            entry = session.scalars(select(AuditEntry).filter_by(event="member_added")).all()[-1]
        assert entry.actor == f"user:{console.made.users['owner']}"
        user = entry.target
        console.press(f"/members/{user}/role", role="admin")
        with console.database.read() as session:
            assert session.get_one(Membership, (console.made.org_id, user)).role == "admin"
        console.press(f"/members/{user}/remove")
        assert "new@acme.example" not in console.get("/members")

    def test_a_link_for_a_member(self, console: Console) -> None:
        console.sign_in()
        page = console.press(f"/members/{console.made.users['viewer']}/link").text
        link = secret_in(page)
        with console.database.read() as session:
            (row,) = session.scalars(select(LoginLink))
        assert row.operator is False
        console.http.cookies.clear()
        reply = console.http.post(link.removeprefix("http://testserver"), headers=SAME_SITE, follow_redirects=False)
        assert reply.status_code == 303
        assert "viewer@acme.example" in console.get("/")

    def test_admins_do_not_become_owners(self, console: Console) -> None:
        made = console.made
        with console.database.read() as session:
            row = session.scalars(select(ApiKey).filter_by(user_id=made.users["member"])).one()
        console.sign_in()
        console.press(f"/members/{made.users['member']}/role", role="admin")
        console.sign_in("member")
        for action, form in (("role", {"role": "viewer"}), ("remove", {}), ("link", {})):
            assert "owner" in console.press(f"/members/{made.users['owner']}/{action}", status=403, **form).text
        assert "owner" in console.press(f"/members/{made.users['viewer']}/role", status=403, role="owner").text
        assert row.user_id == made.users["member"]

    @pytest.mark.parametrize("role", ["member", "viewer"])
    def test_others_do_nothing(self, console: Console, role: str) -> None:
        console.sign_in(role)
        console.get("/members", status=403)
        user = console.made.users["admin"]
        for path in (
            "/members",
            "/projects",
            f"/members/{user}/role",
            f"/members/{user}/remove",
            f"/members/{user}/link",
        ):
            console.press(path, status=403, email="x@y.example", role="admin", name="p")


def test_pages_that_may_be_long_are_drawn_outside_the_event_loop(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a page with thousands of members or projects would hold up all requests for seconds."""
    drawn: list[int] = []

    def page(*given: Any, **values: Any) -> HTMLResponse:
        drawn.append(threading.get_ident())
        return drawing(*given, **values)

    async def loop() -> int:
        return threading.get_ident()

    drawing = render.page
    monkeypatch.setattr(render, "page", page)
    console.sign_in()
    for path in ("/members", "/keys", "/budgets"):
        console.get(path)
    console.press("/keys", name="more", scopes=["train"])
    assert len(drawn) == 4
    assert console.http.portal.call(loop) not in drawn


def test_projects(console: Console) -> None:
    console.sign_in()
    for name in ("new", "ml/new"):
        console.press("/projects", name=name)
        console.press("/projects", status=400, name=name)
        found = re.search(rf'hx-post="/console(/projects/{name}/archive)"', console.get("/members"))
        assert found is not None
        console.press(found.group(1), archived="true")
        assert "archived" in console.get("/members")
        console.press(found.group(1), archived="false")
        with console.database.read() as session:
            assert session.scalars(select(Project).filter_by(name=name)).one().archived_at is None
