"""Sign-in by an OpenID provider, as an operator sets it up: settings, `weftd org sso`, `user unlink` and `doctor`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import select

from api.cli import weftd
from api.commands import doctor
from api.console import sessions
from api.doctor import sign_in
from api.server.serve import CannotServe, check_oidc, note_address, only_one
from store.database.db import Database
from store.load_settings import load_settings
from store.people import identities
from store.people.identities import Account
from store.people.oidc_settings import SECRET, OidcSettings, client_secret
from store.people.organisations import add_member, organisation_named
from store.settings import SettingsError
from store.tables import AuditEntry, BrowserSession, Identity, Organisation, User
from tests.console.provider import Liar, liar_at, provider_process

FILE = """data_dir = "."
[oidc]
issuer = "{issuer}"
client_id = "weft"
public_url = "https://weft.example"
groups = [
  {{group = "g", organisation = "acme", role = "member"}},
  {{group = "h", organisation = "gone", role = "viewer"}},
]
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Liar]:
    with provider_process() as behind, liar_at(behind) as liar:
        yield liar


@pytest.fixture
def folder(tmp_path: Path, database: Database) -> Path:
    def write(session: Any) -> None:
        org = organisation_named(session, "acme")
        add_member(session, org.id, "ann@corp.example", "owner")
        identities.link(session, Account("https://idp.example", "1", "ann@corp.example"))

    database.write_now(write)
    return tmp_path


def configured(folder: Path, issuer: str) -> str:
    file = folder / "weft.toml"
    file.write_text(FILE.format(issuer=issuer))
    return str(file)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(weftd, list(arguments))
    return result.exit_code, result.output


def test_an_organisation_requires_sign_in_by_the_provider(folder: Path, database: Database) -> None:
    code, says = run("org", "sso", "acme", "required", "--data-dir", str(folder))
    assert (code, "oidc.issuer" in says) == (2, True)  # nobody could sign in
    config = configured(folder, "https://idp.example")
    assert run("org", "sso", "acme", "required", "--config", config) == (0, "")
    with database.read() as session:
        assert session.scalars(select(Organisation.sso_required_at)).one() is not None
    assert run("org", "sso", "acme", "optional", "--data-dir", str(folder)) == (0, "")
    with database.read() as session:
        assert session.scalars(select(Organisation.sso_required_at)).one() is None
        entries = session.scalars(select(AuditEntry).where(AuditEntry.event.startswith("organization_sso"))).all()
    assert [(entry.event, entry.actor) for entry in entries] == [
        ("organization_sso_required", "operator"),
        ("organization_sso_not_required", "operator"),
    ]


def test_an_account_is_unlinked(folder: Path, database: Database) -> None:
    def write(session: Any) -> None:
        org, now = organisation_named(session, "acme"), datetime.now(UTC)
        for email in ("ann@corp.example", "bob@corp.example"):
            account = Account("https://idp.example", email, email)
            user = session.scalar(select(User).filter_by(email=email)) or add_member(session, org.id, email, "viewer")
            sessions.sign_in_with_account(session, org.id, user.id, "", account, now, 600)

    database.write_now(write)
    assert run("user", "unlink", "--email", "Ann@corp.example", "--data-dir", str(folder)) == (0, "1\n")
    with database.read() as session:
        assert session.scalars(select(Identity)).all() == []
        left = select(User.email).join(BrowserSession, BrowserSession.user_id == User.id)
        assert session.scalars(left).all() == ["bob@corp.example"]  # and whoever has signed in as Ann is signed out
    assert run("user", "unlink", "--email", "nobody@corp.example", "--data-dir", str(folder))[0] == 2


def test_a_link_leads_to_where_the_server_is(folder: Path, database: Database) -> None:
    link = ("user", "login-link", "--org", "acme", "--email", "ann@corp.example", "--data-dir", str(folder))

    def base(*more: str) -> str:
        return run(*link, *more)[1].partition("/console/login/")[0]

    assert base() == "http://127.0.0.1:8000"
    with only_one(folder):
        note_address(folder, "http://127.0.0.1:8123")
        assert base() == "http://127.0.0.1:8123"
        assert base("--config", configured(folder, "https://idp.example")) == "https://weft.example"
        assert base("--url", "http://10.0.0.1/") == "http://10.0.0.1"
    assert base() == "http://127.0.0.1:8000"


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "CHECKS", (sign_in.provider,))

    def asked(self, folder: Path, issuer: str) -> tuple[int, list[dict[str, str]]]:
        code, says = run("doctor", "--json", "--config", configured(folder, issuer))
        return code, [json.loads(line) for line in says.splitlines()]

    def test_a_provider_that_answers(self, folder: Path, running: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
        running.honest()
        running.discovered = {"code_challenge_methods_supported": ["plain", "S256"]}
        monkeypatch.setenv(SECRET, "hush")
        code, (found, proof, clock, group) = self.asked(folder, running.url)
        states = [each["state"] for each in (found, proof, clock, group)]
        assert (code, states) == (0, ["ok", "ok", "ok", "warning"])
        assert proof["says"] == "codes are exchanged with PKCE and client_secret_basic"
        assert clock["says"] == "the provider's clock agrees with this machine's"
        assert "1 keys; redirect URI https://weft.example/console/sso/callback" in found["says"]
        assert "not there: gone" in group["says"]

    def test_a_provider_with_another_issuer(self, folder: Path, running: Liar) -> None:
        running.discovered = {"issuer": "https://evil.example"}
        code, (found,) = self.asked(folder, running.url)
        assert (code, found["state"], "evil.example" in found["says"]) == (1, "wrong", True)

    @pytest.mark.parametrize(
        ("discovered", "secret", "state", "says", "remedy"),
        [
            (
                {"token_endpoint_auth_methods_supported": ["private_key_jwt"]},
                "hush",
                "wrong",
                "private_key_jwt",
                "client_secret_post",
            ),
            (
                {"token_endpoint_auth_methods_supported": ["client_secret_post"]},
                "",
                "warning",
                "no client secret",
                SECRET,
            ),
            ({"token_endpoint_auth_methods_supported": ["client_secret_post"]}, "hush", "ok", "client_secret_post", ""),
            ({"token_endpoint_auth_methods_supported": ["none"]}, "", "ok", "no secret", ""),
            ({"code_challenge_methods_supported": ["plain"]}, "hush", "wrong", "PKCE with S256", "enable PKCE"),
        ],
    )
    def test_how_it_takes_a_secret(
        self,
        folder: Path,
        running: Liar,
        monkeypatch: pytest.MonkeyPatch,
        discovered: Any,
        secret: str,
        state: str,
        says: str,
        remedy: str,
    ) -> None:
        running.honest()
        running.discovered = discovered
        if secret:
            monkeypatch.setenv(SECRET, secret)
        code, (_, found, *_) = self.asked(folder, running.url)
        assert (code, found["state"]) == (int(state == "wrong"), state)
        assert says in found["says"]
        assert remedy in found["remedy"]
        assert "hush" not in str(found)

    @pytest.mark.parametrize(("ahead_s", "state"), [(-90, "wrong"), (-50, "ok"), (50, "ok"), (90, "wrong")])
    def test_a_providers_clock(self, folder: Path, running: Liar, ahead_s: int, state: str) -> None:
        running.honest()
        running.ahead_s = ahead_s
        code, (_, _, found, _) = self.asked(folder, running.url)
        assert (code, found["state"]) == (int(state == "wrong"), state)
        said = re.search(r"clock is ([+-]\d+) s from", found["says"])
        assert state == "ok" or (said is not None and abs(int(said[1]) - ahead_s) <= 2)

    def test_a_provider_without_keys(self, folder: Path, running: Liar) -> None:
        running.honest()
        running.keys = []
        code, (found,) = self.asked(folder, running.url)
        assert (code, "has no keys" in found["says"]) == (1, True)

    def test_a_provider_that_is_away(self, folder: Path) -> None:
        code, (found,) = self.asked(folder, "http://localhost:9")
        assert (code, "does not answer" in found["says"]) == (1, True)
        assert "login-link" in found["remedy"]

    def test_no_provider_in_the_settings(self, folder: Path) -> None:
        assert run("doctor", "--json", "--data-dir", str(folder)) == (0, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('issuer = "https://idp.example"', "issuer needs client_id and public_url"),
        ('issuer = "http://idp.example"', r"oidc\.issuer: must be an https:// address"),
        ('issuer = "https://user:pw@idp.example"', "must be an https:// address"),
        ("required = true", "required needs an issuer"),
        (
            'issuer = "https://i.example"\nclient_id = "w"\npublic_url = "https://w.example"\nscopes = ["email"]',
            "openid",
        ),
        ('groups = [{group = "g", organisation = "o", role = "king"}]', "role"),
        ("clock_skew_s = 3600", "clock_skew_s"),
        ('allowed_domains = ["@corp.example"]', "allowed_domains"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "weft.toml"
    file.write_text(f'data_dir = "."\n[oidc]\n{text}\n')
    with pytest.raises(SettingsError, match=message):
        load_settings(file)


def test_where_the_secret_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = OidcSettings.model_validate({"client_secret": "in the settings"})
    file = tmp_path / "secret"
    file.write_text("in the file\n")

    def found(environment: dict[str, str]) -> str:
        secret = client_secret(settings, environment)
        return secret.get_secret_value() if secret is not None else ""

    assert found({}) == "in the settings"
    assert found({f"{SECRET}_FILE": str(file)}) == "in the file"
    assert found({f"{SECRET}_FILE": str(file), SECRET: "in the environment"}) == "in the environment"
    monkeypatch.setenv(f"{SECRET}_FILE", str(tmp_path / "none"))
    on = OidcSettings(issuer="https://idp.example", client_id="weft", public_url="https://weft.example")
    with pytest.raises(CannotServe, match="cannot read the file"):
        check_oidc(on)
