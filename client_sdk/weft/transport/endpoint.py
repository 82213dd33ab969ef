"""Where the server is and who we are: arguments first, then Weft's environment variables, then Tinker's."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from weft.errors import WeftError


@dataclass(frozen=True)
class Endpoint:
    """A server's address, without a trailing slash, and an API key for it."""

    base_url: str
    api_key: str = field(repr=False)


def resolve_endpoint(base_url: str | None = None, api_key: str | None = None) -> Endpoint:
    """Fill in what is not given from WEFT_BASE_URL / WEFT_API_KEY, else TINKER_BASE_URL / TINKER_API_KEY."""
    url = base_url or os.environ.get("WEFT_BASE_URL") or os.environ.get("TINKER_BASE_URL")
    key = api_key or os.environ.get("WEFT_API_KEY") or os.environ.get("TINKER_API_KEY")
    if not url:
        raise WeftError("no server address: set WEFT_BASE_URL or pass base_url")
    if not url.startswith(("http://", "https://")):
        raise WeftError(f"the server address {url!r} must start with http:// or https://")
    if not key:
        raise WeftError("no API key: set WEFT_API_KEY or pass api_key (`weftd key create` makes one)")
    return Endpoint(url.rstrip("/"), key)
