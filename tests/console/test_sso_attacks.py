"""Attacks on signing in by an OpenID provider: tokens that prove nothing, answers nobody asked for, other sites.

Tokens come over HTTP from `Liar`, which changes the provider's answers and signs them with its own key.
"""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from joserfc import jwt
from joserfc.jws import JWSRegistry
from sqlalchemy import func, select

from api.oidc import flow, provider
from api.state.failures import TRIES_PER_MINUTE
from api.state.rates import Buckets
from store.tables import BrowserSession, Identity, User
from tests.console.conftest import SAME_SITE, Console
from tests.console.provider import Claims, Liar, good_key, liar_at, provider_process
from tests.console.sso import PUBLIC, SECRET, at_provider, begin, come_back, lie, person, sign_in, take_provider


@pytest.fixture(scope="module")
def running() -> Iterator[Liar]:
    with provider_process() as behind, liar_at(behind) as liar:
        person(liar.url, "ada", groups=["weft-acme"])
        yield liar


@pytest.fixture
def liar(running: Liar) -> Liar:
    running.honest()
    return running


@pytest.fixture
def sso(console: Console, liar: Liar) -> Console:
    take_provider(console, liar.url)
    return console


def nobody_entered(console: Console) -> bool:
    with console.database.read() as session:
        counts = [session.scalar(select(func.count()).select_from(table)) for table in (BrowserSession, Identity)]
        stranger = session.scalar(select(User).filter_by(email="ada@corp.example"))
    return counts == [0, 0] and stranger is None and "weft_console" not in console.http.cookies


NOW = int(time.time())


NOTHING: list[Claims] = [
    {"nonce": "another"},
    {"nonce": None},
    {"aud": "another-client"},
    {"aud": ["weft", "another-client"]},  # also for another client, and no azp says that it is for us
    {"aud": ["weft", "another-client"], "azp": "another-client"},
    {"azp": "another-client"},
    {"aud": None},
    {"aud": []},
    {"iss": "https://evil.example"},
    {"iss": None},
    {"exp": NOW - 3600},
    {"exp": None},
    {"exp": "never"},
    {"iat": NOW + 86_400},
    {"nbf": NOW + 86_400},
    {"sub": None},
    {"sub": ""},
    {"sub": 7},
    {"sub": "x" * 300},
]


def test_claims_that_prove_nothing(sso: Console, liar: Liar) -> None:
    for changed in NOTHING:
        lie(liar, **changed)
        reply = sign_in(sso, "ada")
        assert (reply.status_code, "does not prove who you are" in reply.text) == (400, True), changed
    assert nobody_entered(sso)


def test_clocks_may_differ_by_a_minute(sso: Console, liar: Liar) -> None:
    now = int(time.time())
    for late, status in ((30, 303), (100, 400)):
        lie(liar, exp=now - late, iat=now - late - 60)
        assert sign_in(sso, "ada").status_code == status
    lie(liar, iat=now + 30)
    assert sign_in(sso, "ada").status_code == 303


def letters(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def made_by_hand(header: Claims, secret: bytes | None) -> Callable[[Claims], str]:
    """A signer of tokens that no library would make: HMAC-SHA256 with any secret, or no signature at all."""

    def sign(claims: Claims) -> str:
        text = f"{letters(json.dumps(header).encode())}.{letters(json.dumps(claims).encode())}"
        mark = b"" if secret is None else hmac.digest(secret, text.encode(), "sha256")
        return f"{text}.{letters(mark)}"

    return sign


def public_pem(liar: Liar) -> bytes:
    return bytes(liar.key.public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


class TestSignatures:
    def refused(self, console: Console) -> None:
        reply = sign_in(console, "ada")
        assert (reply.status_code, "does not prove who you are" in reply.text) == (400, True)
        assert nobody_entered(console)

    def test_none(self, sso: Console, liar: Liar) -> None:
        """Even if the provider says that it supports them."""
        liar.discovered = {"id_token_signing_alg_values_supported": ["none", "HS256"]}
        for name in ("none", "None", "nOnE", ""):
            liar.sign = made_by_hand({"alg": name, "kid": "first"}, None)
            self.refused(sso)

    def test_hmac(self, sso: Console, liar: Liar) -> None:
        """Confusion of algorithms: signed with the public key, which everybody knows, or with our own client secret."""
        jwk = json.dumps(liar.published()["keys"][0]).encode()
        for secret in (public_pem(liar), jwk, SECRET.encode(), b""):
            liar.sign = made_by_hand({"alg": "HS256", "kid": "first"}, secret)
            self.refused(sso)

    def test_by_another_key_of_the_same_name(self, sso: Console, liar: Liar) -> None:
        liar.keys = [good_key("first")]
        self.refused(sso)

    def test_by_a_key_in_the_token_itself(self, sso: Console, liar: Liar) -> None:
        thief = good_key("thief")
        header = {"alg": "ES256", "kid": "thief", "jwk": thief.as_dict(private=False)}
        registry = JWSRegistry(algorithms=["ES256"], strict_check_header=False)
        liar.sign = lambda claims: jwt.encode(header, claims, thief, registry=registry)
        self.refused(sso)

    def test_a_changed_body(self, sso: Console, liar: Liar) -> None:
        def sign(claims: Claims) -> str:
            head, _, signature = liar.signed(claims).split(".")
            return ".".join((head, liar.signed({**claims, "email": "owner@acme.example"}).split(".")[1], signature))

        liar.sign = sign
        self.refused(sso)

    def test_what_is_no_token(self, sso: Console, liar: Liar) -> None:
        for token in ("", "x", "..", "a.b.c", "e30.e30.", "x" * 100_000):
            liar.sign = lambda claims, token=token: token
            self.refused(sso)

    def test_keys_that_are_none(self, sso: Console, liar: Liar) -> None:
        liar.keys = []
        self.refused(sso)

    def test_keys_of_other_kinds_are_left_out(self, sso: Console, liar: Liar) -> None:
        """RFC 7517, section 5: keys of a curve that is unknown here, of another kind, and damaged ones."""
        unreadable: list[Claims] = [
            {"kty": "EC", "crv": "brainpoolP256r1", "kid": "other", "x": "AAAA", "y": "AAAA"},
            {"kty": "AKP", "alg": "ML-DSA-65", "kid": "later", "pub": "AAAA"},
            {"kty": "RSA", "kid": "damaged", "n": "AQAB"},
        ]
        liar.unreadable = unreadable
        assert sign_in(sso, "ada").status_code == 303
        liar.keys = []
        assert sign_in(sso, "ada").status_code == 400

    def test_a_key_that_was_rotated_in_is_good_at_once_and_one_that_was_withdrawn_is_not(
        self, sso: Console, liar: Liar
    ) -> None:
        first, second = liar.key, good_key("second")
        assert sign_in(sso, "ada").status_code == 303
        liar.key, liar.keys = second, [first, second]
        assert sign_in(sso, "ada").status_code == 303
        liar.key, liar.keys = first, [second]
        assert sign_in(sso, "ada").status_code == 400

    def test_a_token_that_is_not_of_this_access_token(self, sso: Console, liar: Liar) -> None:
        liar.sign = lambda claims: liar.signed({**claims, "at_hash": "AAAAAAAAAAAAAAAAAAAAAA"})
        self.refused(sso)


class TestWhatIsVerified:
    """An address is verified only if the one that names it, the token or the userinfo endpoint, says so."""

    @pytest.mark.parametrize(
        ("token", "told"),
        [
            ({"email": "owner@acme.example", "email_verified": None}, {"email_verified": True}),
            (
                {"email": None, "email_verified": True},
                {"email": "owner@acme.example", "email_verified": False},
            ),
        ],
        ids=["of the userinfo's address", "of the token's"],
    )
    def test_is_not_another_address(self, sso: Console, liar: Liar, token: Claims, told: Claims) -> None:
        lie(liar, **token)
        liar.told = told
        reply = sign_in(sso, "ada")
        assert (reply.status_code, "has not verified the address owner@acme.example" in reply.text) == (403, True)
        assert nobody_entered(sso)

    def test_is_the_address_that_both_name(self, sso: Console, liar: Liar) -> None:
        lie(liar, email="Ada@corp.example", email_verified=None)
        assert sign_in(sso, "ada").status_code == 303


class TestTheWay:
    def test_a_state_that_is_not_ours(self, sso: Console, liar: Liar) -> None:
        back = at_provider(begin(sso), "ada")
        for wrong in ("state=x&" + back.partition("?")[2].partition("&")[0], ""):
            begin(sso)
            assert come_back(sso, f"/console/sso/callback?{wrong}").status_code == 400
        assert nobody_entered(sso)

    def test_of_two_tabs_the_one_that_began_last_finishes(self, sso: Console, liar: Liar) -> None:
        first, last = (at_provider(begin(sso), "ada") for _ in range(2))
        assert come_back(sso, first).status_code == 400
        assert come_back(sso, last).status_code == 303

    def test_in_a_browser_that_did_not_begin(self, sso: Console, liar: Liar) -> None:
        """Login CSRF: an attacker's answer in another person's browser, whether or not they have begun to sign in."""
        back = at_provider(begin(sso), "ada")
        sso.http.cookies.clear()
        assert come_back(sso, back).status_code == 400
        begin(sso)
        assert come_back(sso, back).status_code == 400
        assert nobody_entered(sso)

    def test_a_code_works_once(self, sso: Console, liar: Liar) -> None:
        address = begin(sso)
        cookie = sso.http.cookies["weft_console_sso"]
        back = at_provider(address, "ada")
        assert come_back(sso, back).status_code == 303
        assert "weft_console_sso" not in sso.http.cookies
        sso.http.cookies.clear()
        assert come_back(sso, back).status_code == 400
        sso.http.cookies.set("weft_console_sso", cookie)  # with all that the browser had
        assert come_back(sso, back).status_code == 502
        assert "weft_console" not in sso.http.cookies

    def test_a_code_of_another_sign_in(self, sso: Console, liar: Liar) -> None:
        """A stolen code is injected into a sign-in that was begun here: its verifier and its nonce differ."""
        stolen = httpx.QueryParams(at_provider(begin(sso), "ada").partition("?")[2])["code"]
        state = httpx.QueryParams(at_provider(begin(sso), "ada").partition("?")[2])["state"]
        assert come_back(sso, f"/console/sso/callback?code={stolen}&state={state}").status_code in (400, 502)
        assert nobody_entered(sso)

    def test_a_cookie_that_was_changed_or_is_old(
        self, sso: Console, liar: Liar, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        back = at_provider(begin(sso), "ada")
        cookie = sso.http.cookies["weft_console_sso"]
        for wrong in (cookie[:-2] + "AA", "x", "", "ü"):
            sso.http.cookies.clear()
            headers = {"cookie": f"weft_console_sso={wrong}".encode()}
            assert sso.http.get(back, headers=headers).status_code == 400
        sso.http.cookies.set("weft_console_sso", cookie)
        monkeypatch.setattr(flow, "LIFE_S", -1)
        assert come_back(sso, back).status_code == 400
        assert nobody_entered(sso)

    def test_the_cookie_tells_nothing(self, sso: Console, liar: Liar) -> None:
        headers = {**SAME_SITE, "hx-request": "true"}
        reply = sso.http.post("https://testserver/console/sso", headers=headers)
        cookie = reply.headers["set-cookie"]
        assert cookie.startswith("__Host-weft_console_sso=")
        assert {"Secure", "HttpOnly", "Path=/", "SameSite=lax", "Max-Age=600"} <= set(cookie.split("; "))
        state = httpx.URL(reply.headers["hx-redirect"]).params["state"]
        assert state not in cookie

    def test_other_sites_begin_nothing(self, sso: Console, liar: Liar) -> None:
        for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}):
            assert sso.http.post("/console/sso", headers=headers).status_code == 403
        assert sso.http.get("/console/sso").status_code in (404, 405)

    def test_it_leads_nowhere_else(self, sso: Console, liar: Liar) -> None:
        for to in (
            "https://evil.example/",
            "//evil.example",
            "/console/\\evil",
            "/api/v1/x",
            "javascript:1",
            "/console/\n/",
        ):
            assert sign_in(sso, "ada", next=to).headers["location"] == "/console/"

    def test_the_provider_is_told_only_our_address(self, sso: Console, liar: Liar) -> None:
        """Whatever Host header the browser sends."""
        headers = {**SAME_SITE, "hx-request": "true", "host": "evil.example", "x-forwarded-host": "evil.example"}
        to = sso.http.post("/console/sso", headers=headers).headers["hx-redirect"]
        assert httpx.URL(to).params["redirect_uri"] == f"{PUBLIC}/console/sso/callback"
        assert httpx.URL(to).params["code_challenge_method"] == "S256"

    def test_an_answer_of_another_issuer(self, sso: Console, liar: Liar) -> None:
        """RFC 9207: an attack that mixes up two providers."""
        back = at_provider(begin(sso), "ada")
        assert come_back(sso, f"{back}&iss=https://evil.example").status_code == 400
        assert nobody_entered(sso)
        assert come_back(sso, at_provider(begin(sso), "ada") + f"&iss={liar.url}").status_code == 303

    def test_one_that_should_say_so_and_does_not(self, sso: Console, liar: Liar) -> None:
        liar.discovered = {"authorization_response_iss_parameter_supported": True}
        assert sign_in(sso, "ada").status_code == 400

    def test_who_is_turned_away_there(self, sso: Console, liar: Liar) -> None:
        state = httpx.URL(begin(sso)).params["state"]
        reply = come_back(sso, f"/console/sso/callback?state={state}&error=access_denied&error_description=<script>")
        assert (reply.status_code, "did not let you in" in reply.text, "<script>" in reply.text) == (403, True, False)


class TestTheProvider:
    def test_userinfo_of_somebody_else(self, sso: Console, liar: Liar) -> None:
        liar.changed, liar.told = {"email": None}, {"sub": "owner", "email": "owner@acme.example"}
        assert sign_in(sso, "ada").status_code == 400
        assert nobody_entered(sso)

    def test_userinfo_adds_what_is_missing_and_changes_nothing(self, sso: Console, liar: Liar) -> None:
        liar.changed, liar.told = {"groups": None}, {"email": "owner@acme.example", "groups": ["weft-acme"]}
        assert sign_in(sso, "ada").status_code == 303
        assert "ada@corp.example" in sso.get("/runs")

    def test_a_document_that_cannot_be_used(self, sso: Console, liar: Liar) -> None:
        wrong: list[Claims] = [
            {"issuer": "https://evil.example"},
            {"issuer": liar.url + "/"},
            {"token_endpoint": "http://169.254.169.254/latest"},
            {"token_endpoint": "file:///etc/passwd"},
            {"jwks_uri": None},
            {"authorization_endpoint": "javascript:1"},
        ]
        for liar.discovered in wrong:
            take_provider(sso, liar.url)  # which drops the document that was read before
            reply = sso.http.post("/console/sso", headers={**SAME_SITE, "accept": "text/html"})
            assert (reply.status_code, "it@corp.example" in reply.text) == (503, True)

    def test_one_that_takes_no_secret(self, sso: Console, liar: Liar, caplog: pytest.LogCaptureFixture) -> None:
        for offered in (["private_key_jwt"], []):
            liar.discovered = {"token_endpoint_auth_methods_supported": offered}
            take_provider(sso, liar.url)
            caplog.clear()
            assert sign_in(sso, "ada").status_code == 502
            assert (offered or ["no method"])[0] in caplog.text

    def test_one_that_is_away_is_asked_once_in_a_while(self, sso: Console, monkeypatch: pytest.MonkeyPatch) -> None:
        take_provider(sso, "http://localhost:9")
        for _ in range(3):
            assert sso.http.post("/console/sso", headers=SAME_SITE).status_code == 503
        monkeypatch.setattr(provider, "TIMEOUT_S", 0.0)  # so a second question would end in another error
        assert sso.http.post("/console/sso", headers=SAME_SITE).status_code == 503

    def test_answers_without_end(self, sso: Console, liar: Liar) -> None:
        liar.discovered = {"more": "x" * (provider.MAX_ANSWER_BYTES + 1)}
        assert sso.http.post("/console/sso", headers=SAME_SITE).status_code == 503


def test_who_fails_again_and_again_waits(sso: Console, liar: Liar) -> None:
    sso.app.state.service.attempts._buckets = Buckets(lambda: 0.0)  # a clock that stands still on a busy machine, too
    for _ in range(TRIES_PER_MINUTE):
        assert come_back(sso, "/console/sso/callback?state=x&code=x").status_code == 400
    reply = come_back(sso, "/console/sso/callback?state=x&code=x")
    assert (reply.status_code, "retry in" in reply.text) == (429, True)
    assert sso.sign_in("owner").status_code == 429


def test_without_a_provider_there_is_no_such_door(console: Console) -> None:
    assert console.http.post("/console/sso", headers=SAME_SITE).status_code == 404
    assert console.http.get("/console/sso/callback?state=x&code=x").status_code == 404
