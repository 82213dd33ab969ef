"""The published description of the HTTP API (`/openapi.json`, and `/docs` for people), made from what the routes are:
their parameters and answers as the framework knows them, and who may call them from the declaration that guards them
(`api.http.access`). Routes read their bodies themselves, so the bodies' types are named here; without one a test fails.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from weft.version import __version__
from weft.wire import types
from weft.wire.account.money import SetBudgetRequest

from api.http.access import Access, declared
from api.routes.openai.bodies import (
    ChatBody,
    ChatTokensBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    ResponsesBody,
    TokenizeBody,
)
from api.routes.paying.payments import TopUp
from api.routes.people.invitations import NewInvitation
from api.routes.people.keys import NewKey, Rotation
from api.routes.people.limits import NewLimits
from api.routes.people.members import NewMember, RoleChange
from api.routes.people.projects import NewProject, ProjectChange

PREFIX = "/api/v1"
#: The type of the JSON body of each path below PREFIX that has one.
BODIES: dict[str, type[Any]] = {
    "/client/config": types.ClientConfigRequest,
    "/client/dynamic_config": types.ClientConfigRequest,
    "/telemetry": types.TelemetrySendRequest,
    "/create_session": types.CreateSessionRequest,
    "/session_heartbeat": types.SessionHeartbeatRequest,
    "/sessions/search": types.SessionSearchRequest,
    "/sessions/{session_id}/finish": types.FinishSessionRequest,
    "/sessions/{session_id}/project": types.AssignProjectRequest,
    "/create_model": types.CreateModelRequest,
    "/create_custom_loss": types.CreateCustomLossRequest,
    "/get_info": types.GetInfoRequest,
    "/optim_step": types.OptimStepRequest,
    "/save_weights": types.SaveWeightsRequest,
    "/save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "/save_weights_external": types.SaveWeightsExternalRequest,
    "/load_weights": types.LoadWeightsRequest,
    "/weights_info": types.WeightsInfoRequest,
    "/copy_weights": types.CopyWeightsRequest,
    "/create_sampling_session": types.CreateSamplingSessionRequest,
    "/join_sampling_session": types.JoinSamplingSessionRequest,
    "/asample": types.SampleRequest,
    "/retrieve_future": types.FutureRetrieveRequest,
    "/retrieve_futures": types.FuturesRetrieveRequest,
    "/stream_future": types.StreamFutureRequest,
    "/cancel_future": types.CancelFutureRequest,
    "/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": types.SetTtlRequest,
    "/weft/runs/{run_id}/metrics": types.LogMetricsRequest,
    "/weft/runs/{run_id}/notes": types.SetNotesRequest,
    "/weft/budgets": SetBudgetRequest,
    "/weft/billing/topups": TopUp,
    "/weft/invitations": NewInvitation,
    "/weft/keys": NewKey,
    "/weft/keys/{key_id}/rotate": Rotation,
    "/weft/members": NewMember,
    "/weft/members/{user_id}": RoleChange,
    "/weft/projects": NewProject,
    "/weft/projects/{project_id}": ProjectChange,
    "/weft/rate_limits/{scope}/{id}": NewLimits,
}
#: The type of the JSON body of the OpenAI- and vLLM-compatible routes (docs/openai.md), by path.
DOORS: dict[str, type[Any]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/chat/completions/tokens": ChatTokensBody,
    "/v1/responses": ResponsesBody,
    "/inference/v1/generate": GenerateBody,
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), TokenizeBody),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), DetokenizeBody),
}
#: Paths whose POST, PUT or PATCH has no JSON body.
OTHER_BODIES: dict[str, dict[str, Any]] = {
    "/auth/token": {},
    "/forward_backward": {"application/x-protobuf": {}, "application/json": {}},
    "/forward": {"application/json": {}},
    "/training_runs/{run_id}/checkpoints/{kind}/{name}/publish": {},
    "/stripe/webhook": {"application/json": {}},
}
#: The meaning of each status, for all routes; all have the form of an error (docs/api.md).
STATUSES = {
    400: "The request can never succeed as it is",
    401: "No good key or token",
    402: "A limit on money does not allow it: the same request goes through after a top-up",
    403: "The key lacks the scope, or the organisation is suspended",
    404: "Not there, or another organisation's",
    408: "There is no result yet: ask again",
    409: "Something of this name is there",
    410: "It was there, and is over",
    413: "The body is larger than this route takes",
    415: "The body is of a kind that this route does not take",
    422: "The body or a parameter does not have the form that it must have",
    429: "Too much in a minute or at a time: wait for Retry-After seconds, send the same request again",
    503: "The server is stopping, or cannot store: send the same request again",
}
#: Statuses of single routes beyond the general rule (`_statuses`).
MORE_STATUSES: dict[str, set[int]] = {
    "/retrieve_future": {408, 410},
    "/session_heartbeat": {410},
    "/sessions/{session_id}/trace.pftrace": {403},  # signed links
    "/downloads/{checkpoint_id}/files/{name}": {403},
    "/downloads/{checkpoint_id}/checkpoint.tar": {403},
}
_ERROR = {"$ref": "#/components/schemas/Error"}
_ABOUT = (
    "What Tinker's clients and Weft's own speak, and the doors for programs that speak OpenAI's API. Examples with "
    "curl, all errors, versions and deprecation: docs/api.md. Keys come from your operator, or from the console."
)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application's routes, without its console."""
    described = copy.deepcopy(FastAPI.openapi(app))
    described["info"] = {"title": "Weft", "version": __version__, "description": _ABOUT}
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _error_schema()
    described["components"]["securitySchemes"] = {
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        "bearer": {"type": "http", "scheme": "bearer", "description": "A key, or a token made from one"},
    }
    paths: dict[str, Any] = {}
    for route, access in api_routes(app):
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted(route.methods or ()):
            operation = described["paths"].get(path, {}).get(method.lower())
            if operation is not None:
                _complete(operation, route, path, access, method, schemas)
                paths.setdefault(path, {})[method.lower()] = operation
    described["paths"] = paths
    return described


def api_routes(app: FastAPI) -> Iterator[tuple[Any, Access]]:
    """Every route (with `path` and `methods`) that declares who may call it, without the console's pages."""
    route: Any
    for route in app.routes:
        access = declared(route)
        if access is not None and not route.path.startswith("/console"):
            yield route, access


def _complete(
    operation: dict[str, Any], route: Any, path: str, access: Access, method: str, schemas: dict[str, Any]
) -> None:
    """Add a route's body, who may call it, and its refusals to FastAPI's description."""
    operation["tags"] = [route.endpoint.__module__.rpartition(".")[2].replace("_", " ")]
    operation["security"] = [] if access.public else [{"key": []}, {"bearer": []}]
    operation["x-weft"] = {"scopes": list(access.scopes), "counts": access.limit, "meters": access.meters}
    has_body = method in ("POST", "PUT", "PATCH")
    if has_body:
        content = _body(path, schemas)
        has_body = bool(content)
        if content:
            operation["requestBody"] = {"required": True, "content": content}
    answers = {status: said for status, said in operation["responses"].items() if status != "422"}
    for status in sorted(_statuses(operation, access, path, has_body)):
        answers[str(status)] = {
            "description": STATUSES[status],
            "content": {"application/json": {"schema": _ERROR}},
        }
    operation["responses"] = answers


def _statuses(operation: dict[str, Any], access: Access, path: str, has_body: bool) -> set[int]:
    found = set(MORE_STATUSES.get(path.removeprefix(PREFIX), ())) | {503}
    if not access.public:
        found |= {401, 403, 429}
    if operation.get("parameters") or has_body:
        found |= {400, 404, 422}
    if has_body:
        found |= {413, 415}
    if access.limit == "work" or access.meters != "nothing":
        found.add(402)
    return found


def _body(path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The content of a body, by media type."""
    name = path.removeprefix(PREFIX)
    if name in OTHER_BODIES:
        return OTHER_BODIES[name]
    body = DOORS.get(path) or BODIES[name]
    schema = _plain(body.model_json_schema(ref_template="#/components/schemas/{model}"))
    schemas.update(schema.pop("$defs", {}))
    title = body.__name__
    schemas[title] = schema
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{title}"}}}


def _plain(schema: Any) -> Any:
    """The schema without `binary`: test generators would make bytes that JSON cannot hold."""
    if isinstance(schema, dict):
        return {key: _plain(value) for key, value in schema.items() if (key, value) != ("format", "binary")}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "type": "object",
        "required": ["detail", "code"],
        "properties": {
            "detail": {**text, "description": "What was wrong, which input, the limit and the value, and what to do"},
            "code": {**text, "description": "One of docs/api.md's, for programs"},
            "request_id": {
                **text,
                "description": "Of the operation that is meant, else of this HTTP request (X-Request-ID)",
            },
        },
    }
