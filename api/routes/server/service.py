"""The service itself: what clients ask first, what this server can do, tokens for keys, and telemetry."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from sqlalchemy.orm import Session
from weft.wire.service import (
    ApiKeyMeResponse,
    AuthTokenResponse,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    KeyOwner,
    OrgDetails,
    StatusResponse,
    SupportedModel,
    TelemetryResponse,
    UserDetails,
)

from api.http.access import declare
from api.http.auth import KeyHolderDep, PrincipalDep, presented_key
from api.http.bodies import read_body, read_json
from api.state.service import ServiceDep
from api.state.telemetry import TelemetryBatch
from api.who.credentials import key_reach
from api.who.reach import permit
from api.who.tokens import Claims
from store import tables
from store.people import keys

router = APIRouter(prefix="/api/v1")


@router.get("/healthz", **declare(scope="public", limit="poll"))
async def healthz() -> HealthResponse:
    return HealthResponse()


@router.post("/client/config", response_model_exclude_unset=True, **declare(scope="any", limit="poll"))
async def client_config(request: Request, service: ServiceDep, who: PrincipalDep) -> ClientConfigResponse:
    """How clients should behave. Whatever is not named here keeps the client's own default."""
    await read_body(request)
    return ClientConfigResponse(
        pjwt_auth_enabled=service.settings.pjwt_auth_enabled,
        parallel_fwdbwd_chunks=True,
        proto_compress_fwdbwd=False,
        fwdbwd_max_chunk_len=service.limits.chunk_data,
        fwdbwd_max_chunk_bytes_count=service.limits.chunk_bytes,
        sample_use_retrieve_futures=service.settings.sample_use_retrieve_futures,
        custom_loss_server_side=True,
        sample_join_sampling_session=True,
        optim_step_heard_of=True,
    )


@router.post("/client/dynamic_config", **declare(scope="any", limit="poll"))
async def client_dynamic_config(request: Request, who: PrincipalDep) -> ClientDynamicConfigResponse:
    await read_body(request)
    return ClientDynamicConfigResponse(
        refresh_interval_sec=300, sample_cancel_enabled=True, sample_cancel_max_batch_size=64
    )


@router.get("/get_server_capabilities", **declare(scope="any", limit="call"))
async def get_server_capabilities(service: ServiceDep, who: PrincipalDep) -> GetServerCapabilitiesResponse:
    longest = service.settings.limits.max_seq_len
    models = [
        SupportedModel(
            model_name=card.name,
            max_context_length=min(card.context_length, longest),
            trainable=True,
            sampleable=True,
        )
        for card in service.cards.values()
    ]
    return GetServerCapabilitiesResponse(supported_models=models)


@router.get("/auth/apikey/me", **declare(scope="any", limit="call"))
async def apikey_me(service: ServiceDep, who: PrincipalDep) -> ApiKeyMeResponse:
    """The key that asks: its public prefix, its organisation, and whose it is; the organisation's own is nobody's."""

    def read(session: Session) -> tuple[str, str, str]:
        key = session.get_one(tables.ApiKey, who.key_id)
        user = session.get(tables.User, key.user_id) if key.user_id is not None else None
        org_name = session.get_one(tables.Organisation, who.org_id).name
        return key.prefix, org_name, user.email if user is not None else ""

    prefix, org_name, email = await service.read(read)
    details = KeyOwner(org_details=OrgDetails(name=org_name), user_details=UserDetails(email=email))
    return ApiKeyMeResponse(key_id=who.key_id, name=prefix, details=details)


@router.delete("/auth/apikey/me", **declare(scope="any", limit="call"))
async def revoke_me(request: Request, service: ServiceDep, who: KeyHolderDep) -> StatusResponse:
    """Revoke the key that asks, and with it all tokens that it was exchanged for."""
    secret = presented_key(request)

    def write(session: Session) -> None:
        permit(who.reach, key_reach(session, session.get_one(tables.ApiKey, who.key_id)), "revoke this key")
        keys.revoke(session, secret, by=who.key_id)

    await service.database.write(write)
    return StatusResponse(status="revoked")


@router.post("/auth/token", **declare(scope="any", limit="poll"))
async def auth_token(request: Request, service: ServiceDep, who: KeyHolderDep) -> AuthTokenResponse:
    """A short-lived token in exchange for the key that asks."""
    await read_body(request)
    assert who.key_id is not None
    return AuthTokenResponse(jwt=service.tokens.issue(Claims(who.key_id, who.org_id, who.until)))


@router.post("/telemetry", **declare(scope="any", limit="background", body="medium"))
async def telemetry(request: Request, service: ServiceDep, who: PrincipalDep) -> TelemetryResponse:
    """Clients report what they do. It is kept for some days and within limits; what is beyond them is dropped, since
    a client can do nothing about it."""
    batch = await read_json(request, TelemetryBatch)
    await service.threads.run(who.org_id, partial(service.telemetry.keep, who.org_id, batch))
    return TelemetryResponse()
