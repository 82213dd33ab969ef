"""ID tokens that real providers sign, by algorithms that the tests of the console do not use."""

from __future__ import annotations

import base64
import hashlib
import time
from datetime import UTC, datetime

import pytest
from joserfc import jwt
from joserfc.jwk import OKPKey

from api.oidc.id_token import checked
from api.oidc.provider import Tokens
from api.oidc.refusals import NotProved
from store.people.oidc_settings import OidcSettings

SETTINGS = OidcSettings(issuer="https://idp.example", client_id="weft", public_url="https://weft.example")


@pytest.mark.parametrize("name", ["EdDSA", "Ed25519"])  # RFC 8037 and, for the same, RFC 9864
def test_the_hash_of_the_access_token_with_ed25519(name: str) -> None:
    """OpenID Connect Core 1.0, 3.1.3.6: the left half, by the hash of the algorithm, which is SHA-512 here."""
    key, now = OKPKey.generate_key("Ed25519", {"kid": "k"}), int(time.time())
    claims = {"iss": SETTINGS.issuer, "aud": "weft", "sub": "ada", "nonce": "n", "iat": now, "exp": now + 60}
    half = base64.urlsafe_b64encode(hashlib.sha512(b"access").digest()[:32]).rstrip(b"=").decode()
    token = jwt.encode({"alg": name, "kid": "k"}, {**claims, "at_hash": half}, key, algorithms=[name])
    keys = {"keys": [key.as_dict(private=False)]}
    assert checked(SETTINGS, Tokens(token, "access"), keys, "n", datetime.now(UTC))["sub"] == "ada"
    with pytest.raises(NotProved, match="at_hash"):
        checked(SETTINGS, Tokens(token, "another"), keys, "n", datetime.now(UTC))
