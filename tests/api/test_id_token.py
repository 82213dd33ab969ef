"""ID tokens that real providers sign, by algorithms that the tests of the console do not use."""

from __future__ import annotations

import base64
import hashlib
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OKPKey
from joserfc.jws import JWSRegistry

from api.oidc.id_token import MAX_LETTERS, checked
from api.oidc.provider import Tokens
from api.oidc.refusals import NotProved
from store.people.oidc_settings import OidcSettings

SETTINGS = OidcSettings(issuer="https://idp.example", client_id="weft", public_url="https://weft.example")


KEYS: dict[str, OKPKey | ECKey] = {
    "Ed25519": OKPKey.generate_key("Ed25519", {"kid": "Ed25519"}),
    "P-256": ECKey.generate_key("P-256", {"kid": "P-256"}),
}


def signed(name: str, curve: str, **claims: Any) -> str:
    """A token with a header that only its provider knows."""
    now = int(time.time())
    whole = {"iss": SETTINGS.issuer, "aud": "weft", "sub": "ada", "nonce": "n", "iat": now, "exp": now + 60, **claims}
    registry = JWSRegistry(algorithms=[name], strict_check_header=False)
    return jwt.encode({"alg": name, "kid": curve, "of": "a provider"}, whole, KEYS[curve], registry=registry)


def subject(token: str, access: str = "access", later: timedelta = timedelta()) -> str:
    keys = {"keys": [key.as_dict(private=False) for key in KEYS.values()]}
    return str(checked(SETTINGS, Tokens(token, access), keys, "n", datetime.now(UTC) + later)["sub"])


@pytest.mark.parametrize(
    ("name", "curve", "hashed"),
    [
        ("EdDSA", "Ed25519", hashlib.sha512),  # RFC 8037
        ("Ed25519", "Ed25519", hashlib.sha512),  # the same by RFC 9864
        ("ES256", "P-256", hashlib.sha256),
    ],
)
def test_the_hash_of_the_access_token(name: str, curve: str, hashed: Any) -> None:
    """OpenID Connect Core 1.0, 3.1.3.6: the left half, by the hash of the algorithm."""
    whole = hashed(b"access").digest()
    half = base64.urlsafe_b64encode(whole[: len(whole) // 2]).rstrip(b"=").decode()
    token = signed(name, curve, at_hash=half)
    assert subject(token) == "ada"
    with pytest.raises(NotProved, match="at_hash"):
        subject(token, access="another")


def test_a_token_has_its_time_and_a_length() -> None:
    with pytest.raises(NotProved, match="expired"):
        subject(signed("ES256", "P-256"), later=timedelta(minutes=5))
    with pytest.raises(NotProved, match=f"at most {MAX_LETTERS}"):
        subject(signed("ES256", "P-256", groups="x" * MAX_LETTERS))
