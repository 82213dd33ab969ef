"""Sign-in by the OpenID provider: whether it answers, as the settings say, and whether groups lead anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, select
from sqlalchemy.exc import SQLAlchemyError

from api.doctor.findings import Finding, ok, warning, wrong
from store.oidc_settings import OidcError, client_secret
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
        secret = client_secret(oidc)
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
    proof = "a secret" if secret is not None else "PKCE alone"
    yield ok(
        ABOUT, f"{metadata.issuer} answers, with {len(keys)} keys; redirect URI {asked.redirect_uri}, proved by {proof}"
    )
    yield from _groups(settings)


async def _asked(provider: Provider) -> tuple[Metadata, list[Any]]:
    from api.oidc.refusals import ProviderError

    metadata = await provider.metadata()
    keys = (await provider.keys()).get("keys")
    if not isinstance(keys, list) or not keys:
        raise ProviderError(f"{metadata.jwks_uri} has no keys")
    return metadata, keys


def _groups(settings: Settings) -> Iterator[Finding]:
    """Organisations that groups lead to and that are not there."""
    named = {rule.organisation for rule in settings.oidc.groups}
    engine = create_engine(settings.effective_database_url)
    try:
        with engine.connect() as connection:
            there = set(connection.scalars(select(Organisation.name).where(Organisation.name.in_(named))))
    except SQLAlchemyError:
        return  # no tables yet; what is wrong with the database is said elsewhere
    finally:
        engine.dispose()
    if missing := sorted(named - there):
        says = f"oidc.groups lead to organisations that are not there: {', '.join(missing)}"
        yield warning(ABOUT, says, f"weftd org create {missing[0]!r}, or mend the name")
