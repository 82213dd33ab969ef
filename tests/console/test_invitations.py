"""Invitations, over HTTP: who may make them, who may use them, and which attacks fail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from api.console import sessions
from api.state.failures import TRIES_PER_MINUTE
from store.people import invitations, organisations
from store.people.keys import new_key, revoke
from store.tables import AuditEntry, BrowserSession, Invitation, Membership, User
from tests.console.conftest import SAME_SITE, Console
from tests.console.provider import Liar, liar_at, provider_process
from tests.console.sso import at_provider, begin, come_back, person, take_provider

GUEST = "guest@elsewhere.example"


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    with provider_process() as behind, liar_at(behind) as liar:
        yield liar


def invite(console: Console, by: str = "owner", /, **body: Any) -> httpx.Response:
    """Ask for an invitation, with the key of `by`."""
    given = {"role": "member", "email": GUEST, **body}
    sent = {name: value for name, value in given.items() if value is not None}
    headers = {"x-api-key": console.made.keys[by]}
    reply: httpx.Response = console.http.post("/api/v1/weft/invitations", json=sent, headers=headers)
    return reply


def link(console: Console, by: str = "owner", /, **body: Any) -> str:
    """The path of a new invitation's link."""
    reply = invite(console, by, **body)
    assert reply.status_code == 200, reply.text
    return "/console/join/" + reply.json()["link"].rpartition("/")[2]


def use(console: Console, path: str, headers: dict[str, str] = SAME_SITE, **form: str) -> httpx.Response:
    reply: httpx.Response = console.http.post(path, data=form, headers=headers, follow_redirects=False)
    return reply


def refused(console: Console, path: str, says: str, status: int = 403, **form: str) -> None:
    reply = use(console, path, **form)
    assert (reply.status_code, says in reply.text) == (status, True), reply.text[-2000:]
    assert "set-cookie" not in reply.headers


def roles(console: Console, email: str = GUEST) -> dict[str, str]:
    """The person's roles: organisation's id -> role."""
    with console.database.read() as session:
        query = select(Membership).join(User, User.id == Membership.user_id).where(User.email == email)
        return {row.org_id: row.role for row in session.scalars(query)}


def test_makes_one_member_once(console: Console) -> None:
    path = link(console, role="viewer")
    for _ in range(2):  # looking uses nothing up
        page = console.http.get(path)
        assert "Acme Research" in page.text
        assert "viewer" in page.text
    assert roles(console) == {}
    reply = use(console, path)
    assert (reply.status_code, reply.headers["location"]) == (303, "/console/")
    assert roles(console) == {console.made.org_id: "viewer"}
    assert GUEST in console.get("/runs")
    console.get("/members", status=403)
    console.http.cookies.clear()
    assert "used already" in console.http.get(path).text
    refused(console, path, "used already", 404)


def test_joining_ends_the_session_before(console: Console) -> None:
    console.sign_in()
    assert use(console, link(console)).status_code == 303
    with console.database.read() as session:
        assert len(list(session.scalars(select(BrowserSession)))) == 1


def test_what_is_kept_and_logged(console: Console) -> None:
    path = link(console)
    secret = path.rpartition("/")[2]
    use(console, path)
    with console.database.read() as session:
        row = session.scalars(select(Invitation)).one()
        entries = session.scalars(select(AuditEntry).order_by(AuditEntry.id.desc()).limit(4)).all()
        user = session.scalars(select(User).filter_by(email=GUEST)).one()
    assert secret not in str(vars(row)) + str([vars(entry) for entry in entries])
    assert [entry.event for entry in reversed(entries)] == [
        "member_invited",
        "member_added",
        "member_invitation_used",
        "console_signed_in",
    ]
    assert entries[0].detail["link_by"] == row.made_by  # whoever made the link could have used it
    assert (row.used_by, entries[1].detail["user_id"]) == (user.id, user.id)
    listed = console.api("weft/invitations")
    assert listed == {"invitations": []}
    assert secret not in str(console.api("audit"))


def test_by_buttons(console: Console) -> None:
    console.sign_in()
    page = console.press("/invitations", role="member", days=3, email=GUEST)
    found = re.search(r'<code id="secret">http://testserver(/console/join/[\w-]+)<', page.text)
    assert found is not None
    assert GUEST in console.get("/members")
    with console.database.read() as session:
        row = session.scalars(select(Invitation)).one()
    assert abs(row.expires_at - datetime.now(UTC) - timedelta(days=3)) < timedelta(minutes=5)
    console.press(f"/invitations/{row.id}/revoke")
    assert GUEST not in console.get("/members")
    refused(console, found.group(1), "taken back", 404)
    console.sign_in("member")
    console.press("/invitations", status=403, role="viewer", email=GUEST)


class TestNoStronger:
    def test_than_its_maker(self, console: Console) -> None:
        made = console.made

        def admin(session: Session) -> str:
            return new_key(session, made.org_id, user_id=made.users["admin"])[1]

        made.keys["admin"] = console.database.write_now(admin)
        assert invite(console, "admin", role="owner").status_code == 403
        assert invite(console, "member", role="viewer").status_code == 403
        assert invite(console, "viewer", role="viewer").status_code == 403
        assert invite(console, "admin", role="admin").status_code == 200
        owners = link(console, role="owner")
        number = console.api("weft/invitations")["invitations"][0]["id"]
        headers = {"x-api-key": made.keys["admin"]}
        assert console.http.delete(f"/api/v1/weft/invitations/{number}", headers=headers).status_code == 403
        assert use(console, owners).status_code == 303

    def test_than_its_maker_is_when_it_is_used(self, console: Console) -> None:
        made = console.made

        def admin(session: Session) -> str:
            return new_key(session, made.org_id, user_id=made.users["admin"])[1]

        made.keys["admin"] = console.database.write_now(admin)
        path = link(console, "admin", role="admin")
        console.database.write_now(
            lambda session: organisations.change_role(session, made.org_id, made.users["admin"], "member")
        )
        assert "no longer give" in console.http.get(path).text
        refused(console, path, "no longer give")
        console.database.write_now(
            lambda session: organisations.change_role(session, made.org_id, made.users["admin"], "owner")
        )
        console.database.write_now(lambda session: revoke(session, made.keys["admin"]))
        refused(console, path, "no longer give")
        assert roles(console) == {}

    def test_by_a_member_who_has_left(self, console: Console) -> None:
        console.sign_in()
        page = console.press("/invitations", role="viewer", email=GUEST)
        path = "/console/join/" + re.findall(r"/join/([\w-]+)", page.text)[0]
        made, other = console.made, "second@acme.example"

        def leave(session: Session) -> None:
            organisations.add_member(session, made.org_id, other, "owner")
            organisations.remove_member(session, made.org_id, made.users["owner"])

        console.database.write_now(leave)
        refused(console, path, "no longer give")

    def test_by_a_key_that_ends(self, console: Console) -> None:
        made, until = console.made, datetime.now(UTC) + timedelta(hours=1)

        def write(session: Session) -> str:
            return new_key(session, made.org_id, user_id=made.users["owner"], expires_at=until)[1]

        made.keys["ending"] = console.database.write_now(write)
        reply = invite(console, "ending", role="viewer")
        assert (reply.status_code, "expiry" in reply.text) == (403, True)


class TestAttacks:
    def test_guesses(self, console: Console) -> None:
        link(console)
        tries = [lambda: console.http.get("/console/join/guess"), lambda: use(console, "/console/join/guess")]
        found = [tries[number % 2]().status_code for number in range(2 * TRIES_PER_MINUTE)]
        allowed = found.index(429)  # some are forgiven meanwhile
        assert allowed >= TRIES_PER_MINUTE
        assert set(found[:allowed]) == {404}

    def test_too_late(self, console: Console) -> None:
        path = link(console)
        now = datetime.now(UTC)
        console.database.write_now(lambda session: session.execute(update(Invitation).values(expires_at=now)))
        refused(console, path, "too old", 404)

    def test_another_organisations(self, console: Console) -> None:
        path = link(console)
        rival = {"x-api-key": console.made.keys["rival"]}
        number = console.api("weft/invitations")["invitations"][0]["id"]
        assert console.api("weft/invitations", "rival") == {"invitations": []}
        assert console.http.delete(f"/api/v1/weft/invitations/{number}", headers=rival).status_code == 404
        console.sign_in("rival")
        console.press(f"/invitations/{number}/revoke", status=404)
        console.http.cookies.clear()
        use(console, path)
        assert set(roles(console)) == {console.made.org_id}

    def test_of_more_days_than_json_has_numbers_for(self, console: Console) -> None:
        console.sign_in()
        form = {"role": "viewer", "email": "guest@example.com", "days": 10**20}
        assert "days" in console.press("/invitations", status=422, **form).text

    def test_from_another_site(self, console: Console) -> None:
        path = link(console)
        for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}):
            assert use(console, path, headers).status_code == 403
        assert roles(console) == {}

    def test_two_at_the_same_moment(self, console: Console) -> None:
        """Both found the link open; only one of them uses it."""
        secret, now = link(console).rpartition("/")[2], datetime.now(UTC)
        used = [
            console.database.write_now(lambda session, user=user: invitations.use(session, secret, user, now))
            for user in ("a", "b")
        ]
        assert [row is not None for row in used] == [True, False]

    def test_for_who_is_a_member_already(self, console: Console) -> None:
        path = link(console, role="admin", email="viewer@acme.example")
        refused(console, path, "is a member already")
        assert roles(console, "viewer@acme.example") == {console.made.org_id: "viewer"}

    def test_mistakes(self, console: Console) -> None:
        for body in (
            {"role": "king"},
            {"days": 0},
            {"days": 31},
            {"days": "x"},
            {"email": "x"},
            {"email": ""},
            {"org_id": "x"},
        ):
            assert invite(console, **body).status_code in (400, 422), body
        reply = invite(console, email=None)  # nothing would tell whom it is for
        assert (reply.status_code, "email" in reply.text) == (400, True)

    def test_how_many(self, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(invitations, "MAX_OPEN", 2)
        monkeypatch.setattr(invitations, "MAX_PER_DAY", 3)
        made = [invite(console).json()["id"] for _ in range(2)]
        assert "2 invitations are open" in invite(console).text
        headers = {"x-api-key": console.made.keys["owner"]}
        for number in made:
            assert console.http.delete(f"/api/v1/weft/invitations/{number}", headers=headers).status_code == 200
        assert invite(console).status_code == 200
        assert "within a day" in invite(console).text


class TestWhoIsSignedIn:
    def csrf_on(self, console: Console, path: str) -> str:
        found = re.search(r'name="csrf" value="(\w*)"', console.http.get(path).text)
        return found.group(1) if found is not None else ""

    def open_link(self, console: Console, liar: Liar) -> str:
        """A link for anybody who signs in, which needs a provider."""
        take_provider(console, liar.url)
        return link(console, email=None)

    def test_joins_as_themselves(self, console: Console, liar: Liar) -> None:
        path = self.open_link(console, liar)
        console.sign_in("rival-member")
        csrf = self.csrf_on(console, path)
        assert csrf
        refused(console, path, "Sign in as yourself", csrf="")
        refused(console, path, "Sign in as yourself", csrf="0" * 64)
        assert use(console, path, csrf=csrf).status_code == 303
        assert console.made.org_id in roles(console, "member@rival.example")

    def test_not_by_a_key_that_goes_less_far(self, console: Console, liar: Liar) -> None:
        path = self.open_link(console, liar)
        console.sign_in("rival-sampler")
        assert "Join as" not in console.http.get(path).text
        refused(console, path, "Sign in as yourself", csrf=console.csrf())

    def test_nor_by_a_colleagues_link(self, console: Console, liar: Liar) -> None:
        path, org_id = self.open_link(console, liar), console.made.rival_id

        def write(session: Session) -> str:
            user = session.scalars(select(User.id).filter_by(email="member@rival.example")).one()
            return sessions.new_link(session, org_id, user, made_by="user:colleague")

        token = console.database.write_now(write)
        assert use(console, f"/console/login/{token}").status_code == 303
        refused(console, path, "Sign in as yourself", csrf=console.csrf())

    def test_nor_by_a_key_that_was_made_in_its_session(self, console: Console, liar: Liar) -> None:
        """The colleague who could open the link may have that key too."""
        path, org_id = self.open_link(console, liar), console.made.rival_id

        def write(session: Session) -> str:
            user = session.scalars(select(User.id).filter_by(email="member@rival.example")).one()
            return sessions.new_link(session, org_id, user, made_by="user:colleague")

        token = console.database.write_now(write)
        use(console, f"/console/login/{token}")
        made = re.search(r'<code id="secret">([^<]+)<', console.press("/keys", name="own", scopes=["admin"]).text)
        assert made is not None
        console.made.keys["own"] = made.group(1)
        console.sign_in("own")
        refused(console, path, "Sign in as yourself", csrf=console.csrf())

    def test_nobody(self, console: Console, liar: Liar) -> None:
        refused(console, self.open_link(console, liar), "Sign in as yourself")

    @pytest.fixture(autouse=True)
    def rivals(self, console: Console) -> None:
        org_id = console.made.rival_id

        def write(session: Session) -> tuple[str, str]:
            user = organisations.add_member(session, org_id, "member@rival.example", "member")
            weak = new_key(session, org_id, user_id=user.id, scopes=["sample"])[1]
            return new_key(session, org_id, user_id=user.id)[1], weak

        console.made.keys["rival-member"], console.made.keys["rival-sampler"] = console.database.write_now(write)


class TestByTheProvider:
    def test_whoever_signs_in(self, console: Console, liar: Liar) -> None:
        take_provider(console, liar.url)
        path = link(console, email=None, role="viewer")
        secret = path.rpartition("/")[2]
        person(liar.url, "guest")
        reply = come_back(console, at_provider(begin(console, invitation=secret), "guest"))
        assert reply.status_code == 303
        assert roles(console, "guest@corp.example") == {console.made.org_id: "viewer"}
        assert "guest@corp.example" in console.get("/runs")
        person(liar.url, "late")
        reply = come_back(console, at_provider(begin(console, invitation=secret), "late"))
        assert (reply.status_code, "used already" in reply.text) == (403, True)
        assert roles(console, "late@corp.example") == {}
        come_back(console, at_provider(begin(console), "guest"))  # and stays a member, in no group
        assert roles(console, "guest@corp.example") == {console.made.org_id: "viewer"}

    def test_only_for_whom_it_is(self, console: Console, liar: Liar) -> None:
        take_provider(console, liar.url)
        secret = link(console).rpartition("/")[2]
        person(liar.url, "thief")
        reply = come_back(console, at_provider(begin(console, invitation=secret), "thief"))
        assert (reply.status_code, "another address" in reply.text) == (403, True)
        person(liar.url, "faker", email=GUEST, email_verified=False)
        assert come_back(console, at_provider(begin(console, invitation=secret), "faker")).status_code == 403
        assert roles(console) == {}
        person(liar.url, "right", email=GUEST)
        assert come_back(console, at_provider(begin(console, invitation=secret), "right")).status_code == 303
        assert roles(console) == {console.made.org_id: "member"}

    def test_an_address_is_what_the_provider_says_now(self, console: Console, liar: Liar) -> None:
        take_provider(console, liar.url)
        person(liar.url, "mary", groups=["weft-acme"])
        come_back(console, at_provider(begin(console), "mary"))
        person(liar.url, "mary", email="new@corp.example", groups=["weft-acme"])
        old, new = (link(console, "rival", email=f"{name}@corp.example").rpartition("/")[2] for name in ("mary", "new"))
        reply = come_back(console, at_provider(begin(console, invitation=old), "mary"))
        assert (reply.status_code, "another address than new@corp.example" in reply.text) == (403, True)
        assert come_back(console, at_provider(begin(console, invitation=new), "mary")).status_code == 303
        assert console.made.rival_id in roles(console, "mary@corp.example")

    def test_alone_where_it_is_required(self, console: Console, liar: Liar) -> None:
        take_provider(console, liar.url, required=True)
        path = link(console)
        assert "Join as" not in console.http.get(path).text
        refused(console, path, "sign in by the provider")
        assert roles(console) == {}
