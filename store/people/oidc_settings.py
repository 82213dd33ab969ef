"""Sign-in to the console by an OpenID provider: what an operator sets in `[oidc]` (docs/sign-in.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from store.people.roles import Role

#: Environment variable that holds the client's secret; with _FILE behind it, the file that does.
SECRET = "WEFT_OIDC_CLIENT_SECRET"
#: Hosts whose addresses may be http, for tests and trials. All others must be https.
_LOCAL = ("127.0.0.1", "localhost", "::1")


class OidcError(ValueError):
    """The OpenID settings cannot be used. The text is one line, without any secret."""


def safe_address(value: str) -> str:
    """A safe address: https, or http on this machine. Raises ValueError for others."""
    parts = urlsplit(value)
    good = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOCAL)
    if not (good and parts.hostname) or parts.username or parts.fragment or not value.isascii():
        raise ValueError(f"must be an https:// address (http:// on this machine alone), got {value[:200]!r}")
    return value


Address = Annotated[str, AfterValidator(lambda value: safe_address(value) if value else value)]
Domain = Annotated[str, Field(pattern=r"^[a-z0-9.-]+\.[a-z0-9-]+$", max_length=253)]


class GroupRole(BaseModel):
    """Whoever has `group` in the claim is a member of `organisation` (its name) with `role`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    group: Annotated[str, Field(min_length=1, max_length=256)]
    organisation: Annotated[str, Field(min_length=1, max_length=128)]
    role: Role


class OidcSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The provider's address, spelt as in the claim `iss`. Empty: nobody signs in by a provider.
    issuer: Address = ""
    #: The provider's name on the button: "Sign in with NAME".
    name: Annotated[str, Field(min_length=1, max_length=40)] = "single sign-on"
    client_id: Annotated[str, Field(max_length=256)] = ""
    #: Better in the environment (WEFT_OIDC_CLIENT_SECRET) or a file that it names. None: a public client, PKCE alone.
    client_secret: SecretStr | None = None
    #: The address at which browsers find this server. The provider sends them back to PUBLIC_URL/console/sso/callback.
    public_url: Address = ""
    scopes: list[str] = ["openid", "email", "profile"]
    #: Domains of e-mail addresses that may sign in; empty: all.
    allowed_domains: list[Domain] = []
    #: The claim that says whether the address is proved.
    verified_claim: str = "email_verified"
    #: The claim that holds groups, or the path to it, such as ["realm_access", "roles"].
    groups_claim: str | Annotated[list[str], Field(min_length=1, max_length=8)] = "groups"
    groups: Annotated[list[GroupRole], Field(max_length=1000)] = []
    #: Shown to people who are in none of the groups: whom they should ask.
    contact: Annotated[str, Field(max_length=200)] = "the operator of this service"
    #: True: no organisation's members can sign in to the console by keys or by links of admins.
    required: bool = False
    #: Keys, members and money are changed only by who has proved themselves to the provider within the hour, by the
    #: claim auth_time. False: within an hour of signing in to the console, for providers that do not tell.
    require_auth_time: bool = True
    #: A session of the console ends after so long at the latest.
    session_life_s: Annotated[int, Field(ge=300, le=86_400)] = 8 * 3600
    clock_skew_s: Annotated[int, Field(ge=0, le=300)] = 60
    #: Signing out of the console also leads to the provider's own sign-out.
    sign_out_of_provider: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.issuer and not (self.client_id and self.public_url):
            raise ValueError("issuer needs client_id and public_url")
        if self.issuer and "openid" not in self.scopes:
            raise ValueError("scopes must have openid")
        if self.required and not self.issuer:
            raise ValueError("required needs an issuer")
        return self

    @property
    def on(self) -> bool:
        return bool(self.issuer)

    @property
    def claim_path(self) -> list[str]:
        return [self.groups_claim] if isinstance(self.groups_claim, str) else list(self.groups_claim)


def client_secret(settings: OidcSettings, environment: Mapping[str, str] = os.environ) -> SecretStr | None:
    """From the environment, from a file that it names, or from the settings, in this order. Raises OidcError."""
    if value := environment.get(SECRET, "").strip():
        return SecretStr(value)
    path = environment.get(f"{SECRET}_FILE", "")
    if not path:
        return settings.client_secret
    try:
        value = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OidcError(f"cannot read the file that {SECRET}_FILE names: {type(error).__name__}") from None
    if not value:
        raise OidcError(f"the file that {SECRET}_FILE names is empty")
    return SecretStr(value)
