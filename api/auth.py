"""Who is asking: an API key (`X-API-Key`, or a bearer token) names the organisation that all lookups are scoped by."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.errors import Unauthenticated
from api.state import Service, service_of
from store.keys import authenticate
from store.tables import ApiKey

#: A revoked key still works for this long.
REMEMBERED_S = 3.0
#: Keys remembered at a time.
REMEMBERED_KEYS = 10_000


@dataclass(frozen=True)
class Principal:
    org_id: str
    key_id: int


class KeyCache:
    """Keys seen in the last seconds, by their SHA-256, so that a busy client costs no read for each request. Only good
    keys are kept: nobody can fill it from outside, and a new key works at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, Principal]] = {}

    def get(self, digest: str) -> Principal | None:
        until, principal = self._known.get(digest, (0.0, None))
        return principal if self._clock() < until else None

    def put(self, digest: str, principal: Principal) -> None:
        if len(self._known) >= REMEMBERED_KEYS:
            self._known.clear()
        self._known[digest] = (self._clock() + REMEMBERED_S, principal)


def presented_key(request: Request) -> str:
    """The key that the request carries. Raises Unauthenticated without one."""
    key = request.headers.get("x-api-key", "")
    if not key:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else ""
    if not key.strip():
        raise Unauthenticated(
            "no API key: send it in the X-API-Key header, or as Authorization: Bearer <key> (set TINKER_API_KEY)"
        )
    return key.strip()


async def principal(request: Request) -> Principal:
    """Authenticate; for `Depends`. Nothing of the request's body has been read by then."""
    secret = presented_key(request)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    cache: KeyCache = request.app.state.keys
    known = cache.get(digest)
    if known is None:
        known = await _look_up(service_of(request), secret, digest)
        cache.put(digest, known)
    return known


async def _look_up(service: Service, secret: str, digest: str) -> Principal:
    def read(session: Session) -> Principal | None:
        org_id = authenticate(session, secret)
        key_id = session.scalar(select(ApiKey.id).where(ApiKey.secret_sha256 == digest))
        return Principal(org_id, key_id) if org_id is not None and key_id is not None else None

    found = await service.read(read)
    if found is None:
        raise Unauthenticated(
            "this API key is unknown or revoked: ask the operator for a key (weftd key create --org NAME)"
        )
    return found


PrincipalDep = Annotated[Principal, Depends(principal)]
