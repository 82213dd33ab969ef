"""A sign-in on its way: what the browser carries to the provider and back (authorization code with PKCE).

What must be remembered between the two requests (state, nonce, verifier, where to go) is in a cookie of the browser
that began, encrypted and signed with the server's secret, for ten minutes: any replica can finish what another has
begun, and nobody can finish in one browser what was begun in another. A code works once, at the provider.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta

import orjson
from authlib.common.urls import add_params_to_uri
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from cryptography.fernet import Fernet, InvalidToken

from api.oidc.id_token import account_of, checked, needs_userinfo, with_userinfo
from api.oidc.provider import Provider
from api.oidc.refusals import NotProved, ProviderError, Unwelcome
from store.people.identities import Account
from store.people.oidc_settings import OidcSettings
from store.people.secret import derive

#: How long a person may take to sign in at the provider.
LIFE_S = 600
#: The longest code, in characters.
MAX_LETTERS = 4096
#: Somebody who was asked to prove themselves anew must have done so within this time.
FRESH = timedelta(minutes=10)
#: Errors from the provider that are about the person, not about this server.
NOT_LET_IN = ("access_denied", "login_required", "interaction_required", "consent_required")


@dataclass(frozen=True)
class Flow:
    """`org_id` is the organisation to sign in to, "" for whichever there is; `invitation` the secret of the invitation
    that is to be used; `fresh` asks for somebody to prove themselves anew."""

    state: str
    nonce: str
    verifier: str
    next: str
    org_id: str = ""
    invitation: str = ""
    fresh: bool = False


class SigningIn:
    """Begins sign-ins and finishes them, its own and those of other replicas with the same secret."""

    def __init__(self, settings: OidcSettings, secret: bytes) -> None:
        self.provider = Provider(settings)
        self._fernet = Fernet(base64.urlsafe_b64encode(derive(secret, "oidc flow")))

    async def begin(self, next: str, *, org_id: str = "", invitation: str = "", fresh: bool = False) -> tuple[str, str]:
        """The address to send the browser to, and the cookie for it. Raises ProviderError."""
        random = secrets.token_urlsafe
        flow = Flow(random(32), random(32), random(48), next, org_id, invitation, fresh)
        return await self._address(flow), self._fernet.encrypt(orjson.dumps(asdict(flow))).decode()

    def begun(self, cookie: str, state: str) -> Flow | None:
        """The sign-in in a cookie; None if the cookie is not ours, was changed, is too old, or is of a sign-in with
        another `state` (RFC 6749, 10.12)."""
        try:
            flow = Flow(**orjson.loads(self._fernet.decrypt(cookie.encode(), ttl=LIFE_S)))
        except (InvalidToken, UnicodeEncodeError, TypeError, ValueError):
            return None
        return flow if hmac.compare_digest(state.encode(), flow.state.encode()) else None

    async def finish(self, flow: Flow, answer: Mapping[str, str]) -> Account:
        """The account that has signed in, from the query with which the provider sent the browser back. Raises
        NotProved, Unwelcome and ProviderError."""
        settings = self.provider.settings
        code = await self._code_in(answer)
        tokens = await self.provider.exchange(code, flow.verifier)
        now = datetime.now(UTC)
        claims = checked(settings, tokens, await self.provider.keys(), flow.nonce, now)
        if needs_userinfo(settings, claims):
            claims = with_userinfo(settings, claims, await self.provider.userinfo(tokens))
        account = account_of(settings, claims)
        if not settings.require_auth_time:
            return replace(account, proved_at=now)
        if flow.fresh and (account.proved_at is None or now - account.proved_at > FRESH):
            raise Unwelcome(f"{settings.name} does not say that you have just proved who you are (auth_time).")
        return account

    async def sign_out_address(self) -> str | None:
        """The provider's own sign-out page, if it has one (RP-Initiated Logout 1.0). Raises ProviderError."""
        settings = self.provider.settings
        page = (await self.provider.metadata()).end_session_endpoint
        if page is None:
            return None
        back = f"{settings.public_url.rstrip('/')}/console/login"
        return str(add_params_to_uri(page, [("client_id", settings.client_id), ("post_logout_redirect_uri", back)]))

    async def _address(self, flow: Flow) -> str:
        settings = self.provider.settings
        more = {"prompt": "login", "max_age": "0"} if flow.fresh else {}
        return str(
            prepare_grant_uri(
                (await self.provider.metadata()).authorization_endpoint,
                settings.client_id,
                "code",
                self.provider.redirect_uri,
                settings.scopes,
                flow.state,
                nonce=flow.nonce,
                code_challenge=create_s256_code_challenge(flow.verifier),
                code_challenge_method="S256",
                **more,
            )
        )

    async def _code_in(self, answer: Mapping[str, str]) -> str:
        """The code in the provider's answer, checked to be of this issuer (RFC 6749, 4.1.2; RFC 9207)."""
        metadata, issuer = await self.provider.metadata(), answer.get("iss")
        if issuer != metadata.issuer and (issuer or metadata.authorization_response_iss_parameter_supported):
            raise NotProved("the answer is of another issuer (iss)")
        if "error" in answer:
            if answer["error"] in NOT_LET_IN:
                raise Unwelcome(f"{self.provider.settings.name} did not let you in.")
            raise ProviderError(f"the provider sent the browser back with {answer['error'][:80]!r}")
        code = answer.get("code", "")
        if not 1 <= len(code) <= MAX_LETTERS:
            raise NotProved("the answer has no code")
        return code
