"""Signing in by an OpenID provider in its own process: who is let in, as which user, with which role, until when."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from api.console import sessions
from store.people import identities, organisations
from store.people.keys import new_key
from store.tables import ApiKey, AuditEntry, BrowserSession, Identity, Membership, Organisation, User
from tests.console.conftest import SAME_SITE, Console
from tests.console.provider import Liar, liar_at, provider_process, toolkit_process
from tests.console.sso import PUBLIC, SECRET, at_provider, begin, come_back, person, sign_in, take_provider


@pytest.fixture(scope="module")
def running() -> Iterator[Liar]:
    with provider_process() as behind, liar_at(behind) as liar:
        yield liar


@pytest.fixture
def liar(running: Liar) -> Liar:
    running.honest()
    running.asked.clear()
    return running


@pytest.fixture
def sso(console: Console, liar: Liar) -> Console:
    take_provider(console, liar.url)
    return console


def memberships(console: Console, email: str) -> dict[str, str]:
    """Organisation -> role."""
    query = select(Organisation.name, Membership.role).join(Membership, Membership.org_id == Organisation.id)
    with console.database.read() as session:
        rows = session.execute(query.join(User, User.id == Membership.user_id).where(User.email == email))
        return {name: role for name, role in rows}


def make_organisation(console: Console, name: str) -> str:
    return str(console.database.write_now(lambda session: organisations.organisation_named(session, name).id))


def test_a_stranger_in_a_group_becomes_a_member(sso: Console, liar: Liar) -> None:
    person(liar.url, "ada", groups=["staff", "weft-acme"])
    reply = sign_in(sso, "ada", next="/console/runs?page=1")
    assert (reply.status_code, reply.headers["location"]) == (303, "/console/runs?page=1")
    assert memberships(sso, "ada@corp.example") == {"Acme Research": "member"}
    page = sso.get("/runs")
    assert "ada@corp.example" in page
    sso.get("/members", status=403)
    with sso.database.read() as session:
        user = session.scalars(select(User).filter_by(email="ada@corp.example")).one()
        added, entered = session.scalars(select(AuditEntry).order_by(AuditEntry.id.desc()).limit(2)).all()[::-1]
    assert (added.event, added.actor, added.detail["by_groups_of"]) == ("member_added", "server", liar.url)
    assert (entered.event, entered.actor, entered.detail) == (
        "console_signed_in",
        f"user:{user.id}",
        {"issuer": liar.url},
    )
    assert entered.ip == "testclient"


def test_a_colleagues_link_leads_to_where_browsers_find_the_server(sso: Console) -> None:
    """Who makes it may have come by another address, which the colleague cannot reach."""
    sso.sign_in("owner")
    assert f"{PUBLIC}/console/login/" in sso.press(f"/members/{sso.made.users['viewer']}/link").text


def test_without_the_liar_in_between(console: Console, liar: Liar) -> None:
    """The provider itself, with its own key and answers."""
    take_provider(console, liar.behind)
    person(liar.behind, "straight", groups=["weft-acme-admins", "weft-acme"])
    assert sign_in(console, "straight").status_code == 303
    assert memberships(console, "straight@corp.example") == {"Acme Research": "admin"}


def test_certificates_are_read_once_and_not_by_each_request(
    sso: Console, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    person(liar.url, "again", groups=["weft-acme"])
    sign_in(sso, "again")
    read: list[Any] = []
    monkeypatch.setattr(ssl, "create_default_context", lambda *args, **options: read.append(options))
    assert sign_in(sso, "again").status_code == 303
    assert read == []


def test_a_person_in_no_group_is_told_whom_to_ask(sso: Console, liar: Liar) -> None:
    person(liar.url, "nobody", groups=["staff"])
    reply = sign_in(sso, "nobody")
    assert reply.status_code == 403
    assert "it@corp.example" in reply.text
    assert "nobody@corp.example" in reply.text
    assert "weft_console" not in sso.http.cookies
    with sso.database.read() as session:
        assert session.scalars(select(User).filter_by(email="nobody@corp.example")).all() == []
        assert session.scalars(select(Identity)).all() == []


def test_a_claim_gives_nothing_but_what_the_operator_says(sso: Console, liar: Liar) -> None:
    """Groups named like organisations or roles, and claims that are no list of names."""
    claims: list[Any] = [
        "Rival",
        ["Rival"],
        {"Rival": "owner"},
        [{"group": "weft-acme"}],
        ["weft-acme:owner"],
        [1],
        None,
    ]
    for groups in [*claims, "WEFT-ACME", ["weft-acme "], "weft-acme,weft-acme-admins"]:
        person(liar.url, "claimant", groups=groups, organisation="Rival", role="owner")
        assert sign_in(sso, "claimant").status_code == 403, groups
    assert memberships(sso, "claimant@corp.example") == {}


def test_the_claim_may_be_elsewhere(sso: Console, liar: Liar) -> None:
    take_provider(sso, liar.url, groups_claim=["realm_access", "roles"])
    person(liar.url, "keycloak", groups=["weft-acme-admins"], realm_access={"roles": "weft-acme"})
    assert sign_in(sso, "keycloak").status_code == 303
    assert memberships(sso, "keycloak@corp.example") == {"Acme Research": "member"}


def test_groups_that_the_provider_leaves_out_are_not_taken_for_none(sso: Console, liar: Liar) -> None:
    """OpenID Connect Core 1.0, 5.6.2: Entra ID answers so for people in many groups."""
    person(liar.url, "many", groups=["weft-acme"])
    sign_in(sso, "many")
    person(liar.url, "many", groups=None, _claim_names={"groups": "src1"})
    assert sign_in(sso, "many").status_code == 403
    assert memberships(sso, "many@corp.example") == {"Acme Research": "member"}


class TestWhoItIs:
    def test_a_member_by_a_verified_address(self, sso: Console, liar: Liar) -> None:
        person(liar.url, "v", email="Viewer@Acme.Example", groups=["weft-acme-admins"])
        assert sign_in(sso, "v").status_code == 303
        assert "viewer@acme.example" in sso.get("/runs")
        with sso.database.read() as session:
            assert session.scalars(select(Identity)).one().user_id == sso.made.users["viewer"]
        assert memberships(sso, "viewer@acme.example") == {"Acme Research": "viewer"}  # people gave it, not a group

    def test_not_by_one_that_is_not_verified(self, sso: Console, liar: Liar) -> None:
        wrong: list[Any] = [False, None, "false", "yes", 0, [True]]
        for verified in wrong:
            person(liar.url, "u", email="owner@acme.example", email_verified=verified, groups=["weft-acme"])
            reply = sign_in(sso, "u")
            assert (reply.status_code, "has not verified" in reply.text) == (403, True), verified
        with sso.database.read() as session:
            assert session.scalars(select(Identity)).all() == []

    def test_addresses_of_other_domains(self, sso: Console, liar: Liar) -> None:
        take_provider(sso, liar.url, allowed_domains=["corp.example"])
        for email in (
            "x@evil.example",
            "x@corp.example.evil.example",
            "x@evilcorp.example",
            "x@corp.example@evil.example",
        ):
            person(liar.url, "x", email=email, groups=["weft-acme"])
            assert sign_in(sso, "x").status_code == 403
        person(liar.url, "x", email="x@corp.example", groups=["weft-acme"])
        assert sign_in(sso, "x").status_code == 303

    def test_a_sign_that_becomes_a_letter(self, sso: Console, liar: Liar) -> None:
        """The Kelvin sign, U+212A, is k in lower case: an address with it is another, and must not become hers."""
        person(liar.url, "kate", email="kate@corp.example", groups=["weft-acme"])
        person(liar.url, "thief", email="\u212aate@corp.example", groups=["weft-acme-admins"])
        reply = sign_in(sso, "thief")
        assert (reply.status_code, "a character that addresses cannot have" in reply.text) == (403, True)
        assert sign_in(sso, "kate").status_code == 303

    def test_an_account_stays_who_it_was(self, sso: Console, liar: Liar) -> None:
        person(liar.url, "mary", groups=["weft-acme"])
        sign_in(sso, "mary")
        person(liar.url, "mary", email="owner@acme.example", groups=["weft-acme"])  # an address that is somebody else's
        assert sign_in(sso, "mary").status_code == 303
        assert "mary@corp.example" in sso.get("/runs")

    def test_an_address_that_changed_hands(self, sso: Console, liar: Liar) -> None:
        person(liar.url, "first", email="shared@corp.example", groups=["weft-acme-admins"])
        person(liar.url, "second", email="shared@corp.example", groups=["weft-acme"])

        def link_of_first(session: Session) -> str:
            user = session.scalars(select(User).filter_by(email="shared@corp.example")).one()
            return sessions.new_link(session, sso.made.org_id, user.id)

        sign_in(sso, "first")
        reply = sign_in(sso, "second")
        assert (reply.status_code, "another account" in reply.text) == (403, True)
        first = sso.database.write_now(link_of_first)
        sso.database.write_now(lambda session: identities.unlink(session, "shared@corp.example"))
        reply = sso.http.post(f"/console/login/{first}", headers=SAME_SITE, follow_redirects=False)
        assert reply.status_code == 401  # the address is not theirs any more
        assert sign_in(sso, "second").status_code == 303


class TestGroups:
    def test_the_role_follows_them(self, sso: Console, liar: Liar) -> None:
        person(liar.url, "bob", groups=["weft-acme-admins", "weft-acme"])
        sign_in(sso, "bob")
        assert memberships(sso, "bob@corp.example") == {"Acme Research": "admin"}
        user = user_id(sso, "bob@corp.example")
        sso.get("/members")
        refused = sso.press(f"/members/{user}/role", status=400, role="viewer")
        assert "follows their groups" in refused.text
        person(liar.url, "bob", groups=["weft-acme"])
        sign_in(sso, "bob")
        assert memberships(sso, "bob@corp.example") == {"Acme Research": "member"}

    def test_who_leaves_them_is_no_member_and_has_no_keys(self, sso: Console, liar: Liar) -> None:
        person(liar.url, "carl", groups=["weft-acme"])
        sign_in(sso, "carl")
        user, org_id = user_id(sso, "carl@corp.example"), sso.made.org_id
        key = sso.database.write_now(lambda session: new_key(session, org_id, user_id=user)[0].id)
        person(liar.url, "carl", groups=[])
        assert sign_in(sso, "carl").status_code == 403
        assert memberships(sso, "carl@corp.example") == {}
        with sso.database.read() as session:
            assert session.get_one(ApiKey, key).revoked_at is not None

    def test_the_last_owner_stays_and_is_not_let_in(self, console: Console, liar: Liar) -> None:
        make_organisation(console, "Solo")
        take_provider(console, liar.url, groups=[{"group": "solo", "organisation": "Solo", "role": "owner"}])
        person(liar.url, "solo", groups=["solo"])
        assert sign_in(console, "solo").status_code == 303
        person(liar.url, "solo", groups=[])
        reply = sign_in(console, "solo")
        assert (reply.status_code, "last owner" in reply.text) == (403, True)
        assert memberships(console, "solo@corp.example") == {"Solo": "owner"}

    def test_the_last_owner_of_one_leaves_the_others(self, console: Console, liar: Liar) -> None:
        """One organisation cannot remove its last owner: the others remove them all the same."""
        solo, beta = make_organisation(console, "Solo"), make_organisation(console, "Beta")
        rules = [
            {"group": "all", "organisation": "Solo", "role": "owner"},
            {"group": "all", "organisation": "Acme Research", "role": "member"},
        ]
        take_provider(console, liar.url, groups=rules)
        person(liar.url, "eve", groups=["all"])
        sign_in(console, "eve")
        console.database.write_now(
            lambda session: organisations.add_member(session, beta, "eve@corp.example", "viewer").id
        )
        person(liar.url, "eve", groups=[])
        assert sign_in(console, "eve").status_code == 303
        assert "Beta" in console.get("/runs")
        assert memberships(console, "eve@corp.example") == {"Solo": "owner", "Beta": "viewer"}
        reply = sign_in(console, "eve", org=solo)
        assert (reply.status_code, "Solo does not let you in: the last owner" in reply.text) == (403, True)

    def test_another_issuer_takes_over(self, sso: Console, liar: Liar) -> None:
        person(liar.url, "finn", groups=["weft-acme-admins"])
        sign_in(sso, "finn")
        take_provider(sso, liar.behind)
        person(liar.behind, "finn", groups=["weft-acme"])
        assert sign_in(sso, "finn").status_code == 303
        assert memberships(sso, "finn@corp.example") == {"Acme Research": "member"}
        person(liar.behind, "finn", groups=[])
        assert sign_in(sso, "finn").status_code == 403
        assert memberships(sso, "finn@corp.example") == {}

    def test_one_of_several_organisations_is_chosen(self, console: Console, liar: Liar) -> None:
        other = make_organisation(console, "Beta")
        rules = [
            {"group": "both", "organisation": name, "role": "viewer"} for name in ("Acme Research", "Beta", "Gone")
        ]
        take_provider(console, liar.url, groups=rules)
        person(liar.url, "dora", groups=["both"])
        reply = sign_in(console, "dora")
        assert (reply.status_code, "Which organisation" in reply.text) == (200, True)
        assert "weft_console" not in console.http.cookies
        assert sign_in(console, "dora", org=other).status_code == 303
        assert "Beta" in console.get("/runs")
        rival = make_organisation(console, "Foreign")
        assert sign_in(console, "dora", org=rival).status_code == 403


class TestRequired:
    def link(self, console: Console, made_by: str | None) -> int:
        made = console.made
        token = console.database.write_now(
            lambda session: sessions.new_link(session, made.org_id, made.users["owner"], made_by=made_by)
        )
        console.http.cookies.clear()
        reply = console.http.post(f"/console/login/{token}", headers=SAME_SITE, follow_redirects=False)
        return int(reply.status_code)

    def test_by_an_organisation(self, sso: Console, liar: Liar) -> None:
        """Keys and colleagues' links open no session, and sessions that they had opened end; the operator's link still
        works."""
        sso.sign_in("owner")
        sso.press(
            "/members/sso", status=403, required="true"
        )  # a person who came by a key cannot know that the provider works
        with_key = dict(sso.http.cookies)
        person(liar.url, "own", email="owner@acme.example")
        sign_in(sso, "own")
        sso.press("/members/sso", required="true")
        assert sso.sign_in("owner").status_code == 403
        assert sso.sign_in("rival").status_code == 303  # another organisation's
        sso.http.cookies.clear()
        sso.http.cookies.update(with_key)
        sso.get("/", status=303)
        assert self.link(sso, "user:somebody") == 403
        assert self.link(sso, None) == 303
        sso.get("/")
        reply = sso.http.get("/api/v1/weft/limits", headers={"x-api-key": sso.made.keys["owner"]})
        assert reply.status_code == 200
        sign_in(sso, "own")
        user = sso.made.users["viewer"]
        sso.press(f"/members/{user}/link", status=403)
        sso.press("/members/sso", required="false")
        assert sso.sign_in("owner").status_code == 303
        sso.http.cookies.clear()
        sso.http.cookies.update(with_key)
        sso.get("/", status=303)  # an ended session stays ended

    def test_only_an_owner_does(self, sso: Console, liar: Liar) -> None:
        person(liar.url, "adm", groups=["weft-acme-admins"])
        sign_in(sso, "adm")
        sso.press("/members/sso", status=403, required="true")

    def test_by_the_installation(self, sso: Console, liar: Liar) -> None:
        sso.sign_in("owner")
        take_provider(sso, liar.url, required=True)
        sso.get("/", status=303)
        assert sso.sign_in("owner").status_code == 403
        assert sso.sign_in("rival").status_code == 403
        assert 'name="key"' not in sso.get("/login")
        assert self.link(sso, None) == 303

    def test_sessions_end_with_the_provider(self, sso: Console, liar: Liar) -> None:
        person(liar.url, "ada", groups=["weft-acme"])
        sign_in(sso, "ada")
        sso.get("/")
        take_provider(sso, "https://other.example")
        sso.get("/", status=303)


class TestSessions:
    def test_last_as_long_as_the_settings_say(self, sso: Console, liar: Liar) -> None:
        take_provider(sso, liar.url, session_life_s=600)
        person(liar.url, "ada", groups=["weft-acme"])
        sign_in(sso, "ada")
        with sso.database.read() as session:
            row = session.scalars(select(BrowserSession)).one()
        assert row.expires_at - row.created_at == timedelta(seconds=600)

        def age(session: Session) -> None:
            session.execute(update(BrowserSession).values(expires_at=datetime.now(UTC)))

        sso.database.write_now(age)
        sso.get("/", status=303)

    def test_signing_in_again_ends_the_one_before(self, sso: Console, liar: Liar) -> None:
        person(liar.url, "ada", groups=["weft-acme"])
        sign_in(sso, "ada")
        assert come_back(sso, at_provider(begin(sso), "ada")).status_code == 303
        with sso.database.read() as session:
            assert session.scalar(select(func.count()).select_from(BrowserSession)) == 1

    def test_what_matters_needs_a_fresh_proof(self, sso: Console, liar: Liar) -> None:
        """Being signed in is not enough: the provider must say that they proved who they are within the hour."""
        person(liar.url, "adm", groups=["weft-acme-admins"])
        liar.changed = {"auth_time": None}
        sign_in(sso, "adm")
        to = sso.press("/keys", status=401, name="k", scopes=["train"]).headers["hx-redirect"]
        assert to.endswith("fresh=1")
        assert "prove again" in sso.http.get(to).text
        reply = sign_in(sso, "adm", fresh="true")
        assert (reply.status_code, "auth_time" in reply.text) == (403, True)
        liar.changed = {"auth_time": int(datetime.now(UTC).timestamp()) - 7200}
        assert sign_in(sso, "adm", fresh="true").status_code == 403
        liar.changed = {"auth_time": int(datetime.now(UTC).timestamp())}
        address = begin(sso, fresh="true")
        assert "prompt=login" in address
        assert "max_age=0" in address
        assert come_back(sso, at_provider(address, "adm")).status_code == 303
        sso.press("/keys", name="k", scopes=["train"])

    def test_where_the_provider_does_not_tell(self, sso: Console, liar: Liar) -> None:
        take_provider(sso, liar.url, require_auth_time=False)
        liar.changed = {"auth_time": None}
        person(liar.url, "adm", groups=["weft-acme-admins"])
        sign_in(sso, "adm")
        sso.press("/keys", name="k", scopes=["train"])

    @pytest.mark.parametrize("everywhere", [True, False])
    def test_signing_out(self, sso: Console, liar: Liar, everywhere: bool) -> None:
        take_provider(sso, liar.url, sign_out_of_provider=everywhere)
        person(liar.url, "ada", groups=["weft-acme"])
        sign_in(sso, "ada")
        to = sso.press("/logout", status=204).headers["hx-redirect"]
        assert to.startswith(f"{liar.url}/oauth2/end_session?" if everywhere else "/console/login")
        sso.get("/", status=303)

    def test_another_replica_finishes(self, sso: Console, liar: Liar) -> None:
        person(liar.url, "ada", groups=["weft-acme"])
        back = at_provider(begin(sso), "ada")
        service = sso.app.state.service
        sso.app.state.service = replace(service)
        assert sso.app.state.service.signing_in is not service.signing_in
        assert come_back(sso, back).status_code == 303


def test_nothing_secret_is_logged_or_kept(sso: Console, liar: Liar, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    person(liar.url, "ada", groups=["weft-acme"])
    sign_in(sso, "ada")
    good = dict(liar.last)
    liar.changed = {"nonce": "another"}
    sign_in(sso, "ada")
    kept = caplog.text + "".join(
        str(path.read_bytes()) for path in sso.app.state.service.settings.data_dir.glob("weft.db*")
    )
    assert "sign-in:" in caplog.text
    for secret in (SECRET, good["id_token"], good["access_token"], liar.last["id_token"], liar.last["access_token"]):
        assert secret not in kept
    assert SECRET not in repr(sso.app.state.service.settings)


def user_id(console: Console, email: str) -> str:
    with console.database.read() as session:
        return session.scalars(select(User.id).filter_by(email=email)).one()


def test_a_provider_of_another_implementation(console: Console) -> None:
    """Django OAuth Toolkit, whose tokens and keys oauthlib and jwcrypto make: who is let in, with which role."""
    pytest.importorskip("oauth2_provider", reason="pip install django-oauth-toolkit")
    people = {
        "eve": {"email": "eve@corp.example", "email_verified": True, "groups": ["weft-acme-admins"]},
        "mal": {"email": "mal@corp.example", "email_verified": False, "groups": ["weft-acme-admins"]},
    }
    with toolkit_process(SECRET, f"{PUBLIC}/console/sso/callback", people) as url:
        take_provider(console, f"{url}/o")
        replies = {}
        for name in people:
            console.http.cookies.delete("weft_console")
            with httpx.Client(base_url=url) as browser:
                assert browser.get(f"/sign-in/{name}").text == name
                back = urlsplit(browser.get(begin(console, next="/console/members")).headers["location"])
            replies[name] = come_back(console, f"{back.path}?{back.query}")
        assert (replies["eve"].status_code, replies["eve"].headers["location"]) == (303, "/console/members")
        assert memberships(console, "eve@corp.example") == {"Acme Research": "admin"}
        assert replies["mal"].status_code == 403
        assert memberships(console, "mal@corp.example") == {}
