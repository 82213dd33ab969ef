from __future__ import annotations

from datetime import UTC, datetime, timedelta

import jwt
import pytest

from api.http.auth import KeyCache
from api.who.tokens import BadToken, Claims, Tokens, key_of, owner_urn
from store.people.keys import revoke
from tests.api.conftest import World

SECRET = b"s" * 32
NOW = datetime.now(UTC).replace(microsecond=0)
tokens = Tokens(SECRET, 900)


def test_what_a_token_says() -> None:
    token = tokens.issue(Claims(7, "org"), NOW)
    said = jwt.decode(token, options={"verify_signature": False})
    assert token.startswith("eyJ")
    assert (said["sub"], said["org_id"], said["email"]) == ("weft:key:7", "org", "")
    assert (said["iat"], said["exp"] - said["iat"]) == (int(NOW.timestamp()), 900)
    assert tokens.read(token) == Claims(7, "org", NOW + timedelta(seconds=900))


def test_a_token_never_outlives_its_secret() -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    soon = now + timedelta(seconds=60)
    assert tokens.read(tokens.issue(Claims(7, "org", soon), now)).expires_at == soon
    later = now + timedelta(days=1)
    assert tokens.read(tokens.issue(Claims(7, "org", later), now)).expires_at == now + timedelta(seconds=900)


def test_an_expired_token() -> None:
    with pytest.raises(BadToken, match="expired"):
        tokens.read(tokens.issue(Claims(7, "org"), NOW - timedelta(seconds=901)))


@pytest.mark.parametrize("key", ["", "other" * 8])
@pytest.mark.parametrize("algorithm", ["none", "HS256", "HS512"])
def test_forged_tokens(key: str, algorithm: str) -> None:
    claims = jwt.decode(tokens.issue(Claims(7, "org")), options={"verify_signature": False})
    if algorithm != "none" and not key:
        return
    forged = jwt.encode(claims, None if algorithm == "none" else key, algorithm)
    with pytest.raises(BadToken, match="not a token"):
        tokens.read(forged)


def test_tokens_of_another_server_or_purpose() -> None:
    for other in (Tokens(b"o" * 32, 900).issue(Claims(7, "org")), "eyJ", "eyJhbGciOiJIUzI1NiJ9.e30.x", "eyJ\xe9.a.b"):
        with pytest.raises(BadToken, match="not a token"):
            tokens.read(other)


@pytest.mark.parametrize(
    "urn", ["", "12", "weft:key:", "weft:key:-1", "weft:key:1x", "weft:key:²", "key:1", "weft:key:" + "9" * 19]
)
def test_owners(urn: str) -> None:
    assert key_of(owner_urn(12)) == 12
    assert key_of("weft:key:" + "9" * 18) == 10**18 - 1
    with pytest.raises(ValueError, match="not an owner"):
        key_of(urn)


class TestOverHttp:
    def token(self, world: World) -> str:
        return str(world.post("auth/token")["jwt"])

    def test_a_token_is_as_good_as_its_key(self, world: World) -> None:
        token = self.token(world)
        session = world.session()
        assert world.get("sessions", key=token)["sessions"] == [session]
        assert world.http.get("/api/v1/sessions", headers={"authorization": f"Bearer {token}"}).is_success
        assert world.get("auth/apikey/me", key=token) == world.get("auth/apikey/me")

    def test_a_token_cannot_be_exchanged(self, world: World) -> None:
        reply = world.call("POST", "auth/token", key=self.token(world))
        assert reply.status_code == 401
        assert "invalid_token" not in reply.headers.get("www-authenticate", "")

    def test_clients_exchange_again_when_their_token_has_expired(self, world: World) -> None:
        old = world.service.tokens.issue(Claims(1, "org"), NOW - timedelta(hours=1))
        for token in (old, "eyJ.a.b", self.token(world)[:-2]):
            reply = world.call("GET", "sessions", key=token)
            assert reply.status_code == 401
            assert 'error="invalid_token"' in reply.headers["www-authenticate"]
            assert token not in reply.text

    def test_a_revoked_key_takes_its_tokens_along(self, world: World) -> None:
        token = self.token(world)
        world.get("sessions", key=token)
        world.database.write_now(lambda session: revoke(session, world.key))
        world.http.app.state.keys = KeyCache()  # type: ignore[attr-defined]
        assert "revoked" in world.get("sessions", key=token, status=401)["detail"]
        world.post("auth/token", status=401)

    def test_a_token_of_another_organisation_s_key(self, world: World) -> None:
        forged = world.service.tokens.issue(Claims(1, "some-other-org"))
        world.get("sessions", key=forged, status=401)
