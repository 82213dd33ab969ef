"""Whether a server is there at all: logged at once if none answers, and waiting is given up where it is hopeless."""

from __future__ import annotations

import logging
import time

import httpx

from weft.errors import APIConnectionError, APITimeoutError

log = logging.getLogger("weft")

#: How long a server that has never answered and refuses connections is given to start. A server that answered before
#: gets the whole budget of the retry policy.
FIRST_S = 10.0


class Contact:
    """Whether anything has answered at one server's address, and for how long connections have been refused there."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._reached = False
        self._refused_since_s: float | None = None
        self._told = False

    def there(self) -> None:
        """The server has answered."""
        if self._told:
            log.warning("%s answers again", self._base_url)
        self._reached, self._refused_since_s, self._told = True, None, False

    def missing(self, error: httpx.ConnectError | httpx.ConnectTimeout) -> APIConnectionError:
        """The error for a connection that could not be made; it is logged once each time the server goes away."""
        kind: type[APIConnectionError]
        if isinstance(error, httpx.ConnectTimeout):
            kind, reason = APITimeoutError, "no connection in time"
        else:
            kind, reason = APIConnectionError, str(error) or type(error).__name__
            self._refused_since_s = time.monotonic() if self._refused_since_s is None else self._refused_since_s
        if not self._told:
            self._told = True
            log.warning("cannot reach %s (%s), retrying", self._base_url, reason)
        hint = "" if self._reached else "; is a server running there? The address is base_url, else WEFT_BASE_URL"
        return kind(f"cannot reach {self._base_url}: {reason}{hint}")

    def hopeless(self, pause_s: float) -> bool:
        """True if it is no use to wait for another pause: the server was never there, and has refused connections for
        too long."""
        if self._reached or self._refused_since_s is None:
            return False
        return time.monotonic() + pause_s - self._refused_since_s > FIRST_S
