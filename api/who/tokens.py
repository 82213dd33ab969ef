"""Short-lived tokens that stand for an API key (JWT, HS256), so that the key itself travels rarely.

A token names its key, and is good for as long as that key is: revoking a key ends its tokens too. It never outlives the
secret that it was exchanged for. Only a key can be exchanged for a token, or one stolen token would last for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import jwt

from store.people.secret import derive

ALGORITHM = "HS256"
#: Tinker's client trusts the identity in a token only from issuers of this form.
ISSUER = "passport-weft"
#: Every JWT begins with this, and none of our keys does.
PREFIX = "eyJ"


class BadToken(Exception):
    """The token is not one of this server, or no longer valid; the message says which."""


@dataclass(frozen=True)
class Claims:
    """`expires_at` None, for a token to be issued: after the lifetime of tokens."""

    key_id: int
    org_id: str
    expires_at: datetime | None = None


class Tokens:
    """Issues and reads the tokens of one server."""

    def __init__(self, secret: bytes, life_s: int) -> None:
        self._key = derive(secret, "tokens")
        self._life = timedelta(seconds=life_s)

    def issue(self, claims: Claims, now: datetime | None = None) -> str:
        now = now or datetime.now(UTC)
        ends = now + self._life if claims.expires_at is None else min(claims.expires_at, now + self._life)
        payload = {
            "iss": ISSUER,
            "sub": owner_urn(claims.key_id),
            "org_id": claims.org_id,
            "email": "",  # a key belongs to an organisation, not to a person
            "iat": int(now.timestamp()),
            "exp": int(ends.timestamp()),
        }
        return jwt.encode(payload, self._key, ALGORITHM)

    def read(self, token: str) -> Claims:
        """The claims of a token. Raises BadToken. Whether its key is still good is not checked here."""
        try:
            payload = jwt.decode(
                token,
                self._key,
                algorithms=[ALGORITHM],
                issuer=ISSUER,
                options={"require": ["iss", "sub", "iat", "exp"]},
            )
            return Claims(key_of(payload["sub"]), str(payload["org_id"]), datetime.fromtimestamp(payload["exp"], UTC))
        except jwt.ExpiredSignatureError:
            raise BadToken("this token has expired: exchange your key for a new one (POST /auth/token)") from None
        except (jwt.PyJWTError, KeyError, ValueError):
            raise BadToken("this is not a token that the server has issued") from None


_URN = "weft:key:"


def owner_urn(key_id: int) -> str:
    """The name of a key's owner, as clients see it."""
    return f"{_URN}{key_id}"


def key_of(urn: str) -> int:
    """The key of an owner's name; ValueError for any other text."""
    number = urn.removeprefix(_URN)
    if not urn.startswith(_URN) or not number.isascii() or not number.isdecimal() or len(number) > 18:
        raise ValueError(f"not an owner: {urn!r}")
    return int(number)
