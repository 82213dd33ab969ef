"""Short-lived tokens in place of the API key, for servers that want them."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from dataclasses import replace
from typing import Any

import pytest
import weft
from starlette.responses import JSONResponse, Response
from weft import ServiceClient
from weft.transport.tokens import Tokens, claims_of, identity_of

from tests.client_sdk.conftest import FAST
from tests.client_sdk.stub_server import Asked, Stub, not_yet, status


def jwt(number: int = 0, life_s: float = 100.0) -> str:
    now = time.time()
    claims = {"sub": f"user:{number}", "org_id": "org:1", "email": "a@b", "iat": now, "exp": now + life_s}
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJ0.{payload}.sig{number}"


def test_claims() -> None:
    assert identity_of(jwt(3)).model_dump() == {"user_urn": "user:3", "org_urn": "org:1", "email": "a@b"}
    for broken in ("", "a.b", "eyJ.W10.x", "eyJ.!!!.x"):
        with pytest.raises(weft.APIResponseValidationError):
            claims_of(broken)


def test_renewed_at_half_of_its_life_or_when_refused() -> None:
    now, made = 0.0, 0

    async def fetch() -> str:
        nonlocal made
        made += 1
        return jwt(made)

    async def story() -> list[str]:
        nonlocal now
        tokens = Tokens(fetch, lambda: now)
        seen = list(await asyncio.gather(*(tokens.current() for _ in range(5))))
        now = 49.0
        seen.append(await tokens.current())
        now = 51.0
        seen.append(await tokens.current())
        seen.append(await tokens.replace(seen[-1]))
        seen.append(await tokens.replace(seen[-2]))
        return [claims_of(token)["sub"] for token in seen]

    assert asyncio.run(story()) == ["user:1"] * 6 + ["user:2", "user:3", "user:3"]


@pytest.fixture
def exchanging(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """A stub that gives tokens, and numbers them."""
    given: list[Any] = []

    def token(asked: Asked) -> Response:
        given.append(asked)
        return JSONResponse({"jwt": jwt(len(given))})

    monkeypatch.setattr(stub, "on_auth_token", token, raising=False)
    return stub


def test_only_the_exchange_sees_the_key(service: ServiceClient, exchanging: Stub) -> None:
    exchanging.config = {"pjwt_auth_enabled": True}
    service.create_lora_training_client("org/tiny").result(10)
    with_key = {asked.path for asked in exchanging.asked if asked.headers["x-api-key"] == "tml-test"}
    assert with_key == {"/client/config", "/auth/token"}
    assert exchanging.paths().count("/auth/token") == 1


def test_a_refused_token_is_replaced_once(service: ServiceClient, exchanging: Stub) -> None:
    exchanging.config = {"pjwt_auth_enabled": True}
    service.create_lora_training_client("org/tiny").result(10)
    refusal = {"www-authenticate": 'Bearer error="invalid_token"'}
    exchanging.faults["/weft/usage"] = [JSONResponse({"detail": "expired"}, 401, refusal)]
    exchanging.replies["GET /weft/usage"] = {"rows": [], "total_nusd": 0, "total_usd": "0", "price_version": "v"}
    assert service.create_rest_client().get_usage().result(10).total_nusd == 0
    exchanging.faults["/weft/usage"] = [JSONResponse({"detail": "expired"}, 401, refusal) for _ in range(2)]
    with pytest.raises(weft.AuthenticationError, match="expired"):
        service.create_rest_client().get_usage().result(10)


def test_a_stream_whose_token_is_refused_is_read_with_another(service: ServiceClient, exchanging: Stub) -> None:
    """Otherwise its tokens would come only at its end, too late to stop it early."""
    exchanging.config = {"pjwt_auth_enabled": True}
    refusal = {"www-authenticate": 'Bearer error="invalid_token"'}
    part = {"sample": 0, "start": 0, "tokens": [1], "logprobs": [-1.0], "versions": [0]}
    told = Response(f"data: {json.dumps(part)}\n\n", media_type="text/event-stream")
    exchanging.faults["/stream_future"] = [JSONResponse({"detail": "expired"}, 401, refusal), told]
    exchanging.faults["/retrieve_future"] = [not_yet()] * 20
    sampler = service.create_sampling_client(base_model="org/tiny")
    drawing = sampler.sample(weft.ModelInput.from_ints([7, 8]), 1, weft.SamplingParams(max_tokens=2), stream=True)
    assert next(iter(drawing)).tokens == [1], "it was told all at its end"
    assert exchanging.paths().count("/stream_future") == 2


def test_a_result_is_waited_for_though_no_token_can_be_had_meanwhile(exchanging: Stub) -> None:
    """Accepted work outlives an outage of up to `outage_budget_s`, and so does whoever waits for it."""
    exchanging.config = {"pjwt_auth_enabled": True}
    policy = replace(FAST, budget_s=0.1, outage_budget_s=60.0)
    run = ServiceClient(base_url=exchanging.base_url, api_key="tml-test", retry=policy).create_lora_training_client("t")
    run.result(10)
    refusal = {"www-authenticate": 'Bearer error="invalid_token"'}
    exchanging.faults["/retrieve_future"] = [JSONResponse({"detail": "expired"}, 401, refusal)]
    exchanging.faults["/auth/token"] = [status(503)] * 30
    assert run.optim_step(weft.AdamParams()).result(30).metrics == {"norm": 1.0}


def test_whoami(service: ServiceClient, exchanging: Stub) -> None:
    assert service.create_rest_client().whoami().result(10).user_urn == "user:1"
    own = weft.RestClient(base_url=exchanging.base_url, api_key=jwt(9))
    assert own.whoami().result(10).user_urn == "user:9"
