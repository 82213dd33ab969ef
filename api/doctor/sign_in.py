"""Sign-in by the OpenID provider: whether it answers as the settings say and takes the client's secret; whether the
clocks agree; and whether the groups lead to organisations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from api.doctor.findings import Finding, ok, warning, wrong
from api.doctor.stores import apart_s
from store.backup.databases import opened
from store.people.oidc_settings import SECRET, OidcError, OidcSettings
from store.settings import Settings
from store.tables import Organisation

if TYPE_CHECKING:
    from api.oidc.provider import Metadata, Provider

ABOUT = "sign-in"


def provider(settings: Settings) -> Iterator[Finding]:
    oidc = settings.oidc
    if not oidc.on:
        return
    if find_spec("authlib") is None:
        yield wrong(
            ABOUT, "oidc.issuer is set, and what it needs is not installed", "pip install 'weft-tuning-server[oidc]'"
        )
        return
    from api.oidc.provider import Provider
    from api.oidc.refusals import ProviderError

    try:
        asked = Provider(oidc)
        metadata, keys = asyncio.run(_asked(asked))
    except OidcError as error:
        yield wrong(ABOUT, str(error), "put the client's secret there, readable by this user")
        return
    except ProviderError as error:
        remedy = (
            "look at oidc.issuer, and whether this machine reaches it; weftd user login-link lets people in meanwhile"
        )
        yield wrong(ABOUT, str(error), remedy)
        return
    yield ok(ABOUT, f"{metadata.issuer} answers, with {len(keys)} keys; redirect URI {asked.redirect_uri}")
    yield from _proof(asked, metadata)
    yield from _clock(oidc)
    yield from _groups(settings)


async def _asked(provider: Provider) -> tuple[Metadata, list[Any]]:
    from api.oidc.refusals import ProviderError

    metadata = await provider.metadata()
    keys = (await provider.keys()).get("keys")
    if not isinstance(keys, list) or not keys:
        raise ProviderError(f"{metadata.jwks_uri} has no keys")
    return metadata, keys


def _proof(provider: Provider, metadata: Metadata) -> Iterator[Finding]:
    """Check that the provider accepts one of the ways in which Weft, as its client, can prove itself when it exchanges
    a code."""
    from api.oidc.refusals import ProviderError

    offered = ", ".join(metadata.token_endpoint_auth_methods_supported)[:200] or "nothing"
    try:
        method = provider.method(metadata)
    except ProviderError as error:
        yield wrong(ABOUT, str(error), "allow client_secret_basic or client_secret_post for this client there")
        return
    if "S256" not in (metadata.code_challenge_methods_supported or ["S256"]):
        yield wrong(ABOUT, "the provider does not take PKCE with S256", "enable PKCE (S256) for this client there")
    elif method == "none" and "none" not in metadata.token_endpoint_auth_methods_supported:
        says = f"there is no client secret, and the provider's token endpoint names only {offered}"
        yield warning(ABOUT, says, f"put the client's secret into {SECRET}, unless the client is public there")
    else:
        yield ok(ABOUT, f"codes are exchanged with PKCE and {'no secret' if method == 'none' else method}")


def _clock(oidc: OidcSettings) -> Iterator[Finding]:
    """Check that the provider's clock agrees with ours, by the date of its answers (RFC 9110, section 6.6.1: whole
    seconds, rounded down)."""
    from api.oidc.provider import TIMEOUT_S, discovery_address

    def read() -> float:
        headers = httpx.get(discovery_address(oidc), timeout=TIMEOUT_S).headers
        return parsedate_to_datetime(headers["date"]).timestamp() + float(headers.get("age", 0))

    try:
        off = apart_s(read, grain_s=1.0)
    except (httpx.HTTPError, KeyError, ValueError):
        return  # the answer has no date
    if abs(off) > oidc.clock_skew_s:
        says = f"the provider's clock is {off:+.0f} s from this machine's; oidc.clock_skew_s allows {oidc.clock_skew_s}"
        yield wrong(ABOUT, says, "have both follow the same time (chrony, systemd-timesyncd): ID tokens are refused")
    else:
        yield ok(ABOUT, "the provider's clock agrees with this machine's")


def _groups(settings: Settings) -> Iterator[Finding]:
    """Organisations that groups lead to, but that do not exist."""
    named = {rule.organisation for rule in settings.oidc.groups}
    try:
        with opened(settings.effective_database_url) as engine, engine.connect() as connection:
            there = set(connection.scalars(select(Organisation.name).where(Organisation.name.in_(named))))
    except SQLAlchemyError:
        return  # no tables yet; problems of the database are reported elsewhere
    if missing := sorted(named - there):
        says = f"oidc.groups lead to organisations that are not there: {', '.join(missing)}"
        yield warning(ABOUT, says, f"weftd org create {missing[0]!r}, or mend the name")
