"""The OpenID provider over HTTP: its discovery document, its keys, and the exchange of a code for tokens.

Discovery is remembered for minutes. Keys are fetched for each sign-in, after the provider has taken the code: there are
few of them, and so a key that was rotated in is good at once and one that was withdrawn is not. Redirects are not
followed, answers are bounded in size and time, and no secret, code or token is in any message.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import orjson
from authlib.oauth2.auth import ClientAuth
from authlib.oauth2.rfc6749.parameters import prepare_token_request
from pydantic import AfterValidator, BaseModel, ValidationError

from api.oidc.refusals import ProviderError
from store.people.oidc_settings import OidcSettings, client_secret, safe_address

#: How long a discovery document is used, and how long a failure to get one is remembered.
REMEMBERED_S = 300.0
FAILED_S = 5.0
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20
#: How many sign-ins may wait for the provider at a time; further ones wait for these.
AT_ONCE = 16
#: Ways in which a client gives its secret; the first one that the provider accepts is used.
METHODS = ("client_secret_basic", "client_secret_post")

_Address = Annotated[str, AfterValidator(safe_address)]


class Metadata(BaseModel):
    """The used parts of a discovery document (OpenID Connect Discovery 1.0, section 3)."""

    issuer: str
    authorization_endpoint: _Address
    token_endpoint: _Address
    jwks_uri: _Address
    userinfo_endpoint: _Address | None = None
    end_session_endpoint: _Address | None = None
    token_endpoint_auth_methods_supported: list[str] = ["client_secret_basic"]
    #: RFC 8414: methods of PKCE; None if the provider does not list them.
    code_challenge_methods_supported: list[str] | None = None
    #: RFC 9207: whether each answer names its issuer.
    authorization_response_iss_parameter_supported: bool = False


@dataclass(frozen=True)
class Tokens:
    """The tokens that a code was exchanged for."""

    id_token: str
    access_token: str


class Provider:
    """The provider. Lives in the event loop, and holds nothing that another replica would need."""

    def __init__(self, settings: OidcSettings) -> None:
        self.settings = settings
        self._secret = client_secret(settings)
        self._known: tuple[float, Metadata | ProviderError] | None = None
        self._asking = asyncio.Lock()
        self._room = asyncio.Semaphore(AT_ONCE)

    @property
    def redirect_uri(self) -> str:
        return f"{self.settings.public_url.rstrip('/')}/console/sso/callback"

    async def metadata(self) -> Metadata:
        """Raises ProviderError."""
        async with self._asking:  # callers that come meanwhile wait for the same answer
            if self._known is None or time.monotonic() >= self._known[0]:
                self._known = await self._discover()
        if isinstance(self._known[1], ProviderError):
            raise ProviderError(str(self._known[1]))
        return self._known[1]

    async def _discover(self) -> tuple[float, Metadata | ProviderError]:
        """The discovery document or the failure to get it, and until when it is used."""
        try:
            metadata = read_metadata(self.settings, await self._asked("GET", discovery_address(self.settings)))
        except ProviderError as error:
            return time.monotonic() + FAILED_S, error
        return time.monotonic() + REMEMBERED_S, metadata

    async def exchange(self, code: str, verifier: str) -> Tokens:
        """The tokens of a code (RFC 6749, section 4.1.3; RFC 7636). Raises ProviderError."""
        metadata = await self.metadata()
        method = self.method(metadata)
        secret = self._secret.get_secret_value() if self._secret is not None else ""
        grant = "authorization_code"
        body = prepare_token_request(grant, code=code, redirect_uri=self.redirect_uri, code_verifier=verifier)
        headers = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
        client = self.settings.client_id, secret
        if method == "client_secret_basic":  # RFC 6749, 2.3.1: encoded first, which Authlib leaves to its caller
            client = quote(client[0], safe=""), quote(client[1], safe="")
        auth = ClientAuth(*client, method)
        uri, headers, body = auth.prepare("POST", metadata.token_endpoint, headers, body)
        found = await self._asked("POST", uri, headers, body)
        given = found.get("id_token"), found.get("access_token")
        if not (isinstance(given[0], str) and isinstance(given[1], str)):
            raise ProviderError("the token endpoint gave no id_token and access_token: is the scope openid asked for?")
        return Tokens(given[0], given[1])

    def method(self, metadata: Metadata) -> str:
        """The way in which Weft, as the provider's client, proves itself at the token endpoint: one of the two of RFC
        6749, section 2.3.1. Raises ProviderError if the provider accepts neither."""
        offered = metadata.token_endpoint_auth_methods_supported
        found = "none" if self._secret is None else next((way for way in METHODS if way in offered), None)
        if found is None:
            raise ProviderError(
                f"the provider takes a client's secret by {', '.join(offered)[:200] or 'no method'}, and Weft gives it "
                f"by {' or '.join(METHODS)}: allow one of them for this client"
            )
        return found

    async def keys(self) -> dict[str, Any]:
        """The provider's present JWK Set. Raises ProviderError."""
        return await self._asked("GET", (await self.metadata()).jwks_uri)

    async def userinfo(self, tokens: Tokens) -> dict[str, Any]:
        """Claims that are not in the ID token; none if the provider has no such endpoint. Raises ProviderError."""
        endpoint = (await self.metadata()).userinfo_endpoint
        if endpoint is None:
            return {}
        headers = {"authorization": f"Bearer {tokens.access_token}", "accept": "application/json"}
        return await self._asked("GET", endpoint, headers)

    async def _asked(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: str | None = None
    ) -> dict[str, Any]:
        client = httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, verify=_trusted())
        async with self._room, client:
            try:
                async with (
                    asyncio.timeout(TIMEOUT_S),
                    client.stream(method, url, headers=headers, content=body) as reply,
                ):
                    answer = await _bounded(reply, url)
                    status = reply.status_code
            except (httpx.HTTPError, TimeoutError) as error:
                raise ProviderError(f"{url} does not answer: {type(error).__name__}") from None
        return _object(answer, status, url)


@cache
def _trusted() -> ssl.SSLContext:
    """The trusted certificates, read once: that takes a twentieth of a second, in which nobody else is served."""
    return httpx.create_ssl_context()


def discovery_address(settings: OidcSettings) -> str:
    return f"{settings.issuer.rstrip('/')}/.well-known/openid-configuration"


def read_metadata(settings: OidcSettings, found: dict[str, Any]) -> Metadata:
    """A usable discovery document. Raises ProviderError."""
    try:
        metadata = Metadata.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProviderError(f"the discovery document of {settings.issuer}: {where}: {first['msg']}") from None
    if metadata.issuer != settings.issuer:
        raise ProviderError(
            f"the discovery document says issuer {metadata.issuer[:200]!r}, and oidc.issuer is {settings.issuer!r}: "
            "they must be the same to the letter"
        )
    return metadata


async def _bounded(reply: httpx.Response, url: str) -> bytes:
    answer = bytearray()
    async for piece in reply.aiter_bytes():
        answer += piece
        if len(answer) > MAX_ANSWER_BYTES:
            raise ProviderError(f"{url} answers with more than {MAX_ANSWER_BYTES} bytes")
    return bytes(answer)


def _object(answer: bytes, status: int, url: str) -> dict[str, Any]:
    try:
        found = orjson.loads(answer)
    except orjson.JSONDecodeError:
        found = None
    if status != 200:
        error = found.get("error") if isinstance(found, dict) else None
        said = f" and says {error[:80]!r}" if isinstance(error, str) else ""
        raise ProviderError(f"{url} answers {status}{said}")
    if not isinstance(found, dict):
        raise ProviderError(f"{url} answers with something else than a JSON object")
    return found
