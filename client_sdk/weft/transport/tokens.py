"""Short-lived tokens (JWT) that a server may give for an API key, so that the key itself is sent rarely.

A token is fetched when first needed and again when half of its life is over, by the server's own clock readings in it,
so that a wrong clock here does not matter. Signatures are the server's business: nothing here trusts a claim.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from weft.errors import APIResponseValidationError
from weft.wire.sessions import WhoamiResponse

#: A token without readable times is used this long.
DEFAULT_LIFE_S = 60.0


def claims_of(jwt: str) -> dict[str, Any]:
    """The claims of a token. Raises `APIResponseValidationError` for a text that is no token."""
    try:
        payload = jwt.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, binascii.Error):
        raise APIResponseValidationError("the credential is not a readable JWT") from None
    if not isinstance(claims, dict):
        raise APIResponseValidationError("the claims of the JWT are not an object")
    return claims


def identity_of(jwt: str) -> WhoamiResponse:
    """The identity that a token speaks for."""
    claims = claims_of(jwt)
    if not claims.get("sub") or not claims.get("org_id"):
        raise APIResponseValidationError(f"the JWT names no user or organisation; it has {sorted(claims)}")
    return WhoamiResponse(user_urn=str(claims["sub"]), org_urn=str(claims["org_id"]), email=claims.get("email"))


class Tokens:
    """The token in use. `fetch` exchanges the API key for a new token."""

    def __init__(self, fetch: Callable[[], Awaitable[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch = fetch
        self._clock = clock
        self._token = ""
        self._renew_at = 0.0
        self._lock = asyncio.Lock()

    async def current(self) -> str:
        """A token with at least half of its life ahead."""
        async with self._lock:
            if not self._token or self._clock() >= self._renew_at:
                await self._renew()
            return self._token

    async def replace(self, refused: str) -> str:
        """Another token than the one that the server has just refused."""
        async with self._lock:
            if self._token == refused:
                await self._renew()
            return self._token

    async def _renew(self) -> None:
        token = await self._fetch()
        self._token, self._renew_at = token, self._clock() + _life_s(token) / 2


def _life_s(token: str) -> float:
    claims = claims_of(token)
    try:
        return max(0.0, float(claims["exp"]) - float(claims["iat"]))
    except (KeyError, TypeError, ValueError):
        return DEFAULT_LIFE_S
