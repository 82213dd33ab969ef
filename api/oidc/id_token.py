"""ID tokens and what they say: who somebody is, proved by the provider's signature (OpenID Connect Core 1.0, 3.1.3.7).

Signatures and claims are checked by joserfc and Authlib. Only algorithms with a public key are taken: `none`, and those
whose key would be something that is no secret here, are refused whatever the token or the provider says.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from joserfc.jws import JWSRegistry

from api.oidc.provider import Tokens
from api.oidc.refusals import NotProved, Unwelcome
from store.people.identities import Account
from store.people.oidc_settings import OidcSettings

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
#: The longest token, in characters, and the most groups in one; beyond them nobody is signed in.
MAX_LETTERS = 65_536
MAX_GROUPS = 10_000
#: Errors that reading a key or a token raises.
UNREADABLE = (JoseError, ValueError, TypeError, KeyError)


def checked(settings: OidcSettings, tokens: Tokens, keys: dict[str, Any], nonce: str, now: datetime) -> dict[str, Any]:
    """The claims of an ID token: signed by one of `keys`, by our issuer, for us, in time, and for the sign-in that has
    `nonce`. Raises NotProved."""
    if len(tokens.id_token) > MAX_LETTERS:
        raise NotProved(f"an ID token of {len(tokens.id_token)} letters; at most {MAX_LETTERS} are read")
    registry = JWSRegistry(algorithms=list(ALGORITHMS), strict_check_header=False)
    expected = {
        "iss": {"essential": True, "value": settings.issuer},
        "aud": {"essential": True, "value": settings.client_id},
    }
    params = {"nonce": nonce, "client_id": settings.client_id, "access_token": tokens.access_token}
    try:
        token = jwt.decode(tokens.id_token, _readable(keys), registry=registry)
        header = {**token.header, "alg": "EdDSA"} if token.header["alg"] == "Ed25519" else token.header
        claims = CodeIDToken(token.claims, header, expected, params)  # Authlib knows Ed25519 by its older name alone
        claims.validate(now=int(now.timestamp()), leeway=settings.clock_skew_s)
    except UNREADABLE as error:
        raise NotProved(f"{type(error).__name__}: {str(error)[:200]}") from None
    subject = claims.get("sub")
    if not (isinstance(subject, str) and 1 <= len(subject) <= 255):
        raise NotProved("sub is not 1 to 255 letters")
    return dict(claims)


def _readable(keys: dict[str, Any]) -> KeySet:
    """The keys that can be read; others must not keep these from being used (RFC 7517, section 5)."""
    known = []
    for key in keys["keys"]:
        with suppress(*UNREADABLE):
            known += KeySet.import_key_set({"keys": [key]}).keys
    return KeySet(known)


def needs_userinfo(settings: OidcSettings, claims: Mapping[str, Any]) -> bool:
    """Whether the ID token lacks a claim that the settings need."""
    wants_groups = bool(settings.groups) and _at(claims, settings.claim_path) is None
    return "email" not in claims or settings.verified_claim not in claims or wants_groups


def with_userinfo(settings: OidcSettings, claims: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The claims of the ID token and of userinfo together; where both have a claim, the signed one counts. But
    `email_verified` is taken from the one that names the address, since the other may mean another address. Raises
    NotProved if userinfo is about somebody else."""
    if more and more.get("sub") != claims["sub"]:
        raise NotProved("the userinfo endpoint tells of another sub than the ID token")
    both, verified = {**more, **claims}, settings.verified_claim
    if "email" not in claims:
        both[verified] = more.get(verified, claims.get(verified))
    elif str(more.get("email", claims["email"])).lower() != str(claims["email"]).lower():
        both[verified] = claims.get(verified)
    return both


def account_of(settings: OidcSettings, claims: Mapping[str, Any]) -> Account:
    """The account in the claims. Raises Unwelcome if its address is missing, not verified, in a domain that may not
    sign in, or would become another address in lower case."""
    email = claims.get("email")
    if not isinstance(email, str) or not email:
        raise Unwelcome(f"{settings.name} does not tell your e-mail address here.")
    if any(letter.lower().isascii() != letter.isascii() for letter in email):  # U+212A is not a k, but becomes one
        raise Unwelcome(f"{settings.name} sends an e-mail address for you with a character that addresses cannot have.")
    email = email.strip().lower()
    if claims.get(settings.verified_claim) not in (True, "true", 1, "1"):
        raise Unwelcome(f"{settings.name} has not verified the address {email}.")
    if settings.allowed_domains and email.rpartition("@")[2] not in settings.allowed_domains:
        raise Unwelcome(f"Addresses like {email} may not sign in here.")
    return Account(settings.issuer, claims["sub"], email, groups_of(settings, claims), _proved_at(claims))


def groups_of(settings: OidcSettings, claims: Mapping[str, Any]) -> frozenset[str]:
    """Group names: a list, or a single name; anything else is none. Raises Unwelcome if the provider has left the
    groups out."""
    path = settings.claim_path
    left_out = claims.get("_claim_names")
    if settings.groups and isinstance(left_out, dict) and path[0] in left_out:  # OpenID Connect Core 1.0, 5.6.2
        raise Unwelcome(f"{settings.name} tells of too many groups at once to name them.")
    found = _at(claims, path)
    names = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    return frozenset(name for name in names[:MAX_GROUPS] if isinstance(name, str))


def _proved_at(claims: Mapping[str, Any]) -> datetime | None:
    at = claims.get("auth_time")
    if isinstance(at, bool) or not isinstance(at, int | float):
        return None
    now = datetime.now(UTC)
    try:
        return min(datetime.fromtimestamp(at, UTC), now)
    except (ValueError, OverflowError, OSError):
        return now - timedelta(days=365)


def _at(claims: Mapping[str, Any], path: list[str]) -> Any:
    found: Any = claims
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
