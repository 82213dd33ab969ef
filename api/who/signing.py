"""Links that need no key: a path, an instant when it ends, the key that asked for it, and a signature over the three.

Whoever has the link may read what it names until it expires, at the latest when the credential ends that asked for it
(`Reach.ends_by`; `api.http.auth.link_holder` for a key that is revoked and an organisation that is suspended); nobody
can make or change one without the server's secret. The route that serves such a path asks `Signer.verify` before
anything else.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import urlencode

from fastapi import Request

from api.errors import ApiError
from api.who.principal import Principal
from store.people.secret import derive


class LinkRefused(ApiError):
    """A signed link that was changed, or has expired. Permanent, so never a status that clients retry."""

    status = 403
    code = "link_refused"


class Signer:
    """Signs and verifies paths such as `/api/v1/downloads/...`, as they were routed: the `path` of a request's scope.
    (`request.url` is put together with the Host header, which its sender chooses.)"""

    def __init__(self, secret: bytes) -> None:
        self._key = derive(secret, "signed-links")

    def sign(self, path: str, expires: datetime, key_id: int) -> str:
        """The query string that makes `path` readable until `expires` (rounded down to a second), as long as the key
        that asks for it is good."""
        until, key = str(int(expires.timestamp())), str(key_id)
        return urlencode({"expires": until, "key": key, "signature": self._signature(path, until, key)})

    def verify(self, path: str, query: Mapping[str, str], now: datetime | None = None) -> int:
        """The key that asked for the link. Raises LinkRefused unless `query` holds a signature for `path` that has not
        expired."""
        until, key, signature = (query.get(name, "") for name in ("expires", "key", "signature"))
        if not hmac.compare_digest(self._signature(path, until, key).encode(), signature.encode()):
            raise LinkRefused("this link is not one that the server has signed: ask for a new one")
        if (now or datetime.now(UTC)).timestamp() >= int(until):
            raise LinkRefused("this link has expired: ask for a new one")
        return int(key)

    def link(self, request: Request, path: str, expires: datetime, who: Principal) -> str:
        """The whole URL, on the host by which the client of `request` reached this server."""
        assert who.key_id is not None, "people at the console ask for none"
        return f"{str(request.base_url).rstrip('/')}{path}?{self.sign(path, expires, who.key_id)}"

    def _signature(self, path: str, until: str, key: str) -> str:
        return hmac.new(self._key, f"{path}\n{until}\n{key}".encode(), hashlib.sha256).hexdigest()
