"""An OpenAPI document of the server's routes, for fuzzing them.

Routes read their bodies themselves (`api.http.bodies`), so the framework knows only paths and parameters; the schemas
of the bodies are those of the wire types.
"""

from __future__ import annotations

import copy
from typing import Any

from weft.wire import types
from weft.wire.money import SetBudgetRequest

from api.routes.keys import NewKey, Rotation
from api.routes.limits import NewLimits
from api.routes.members import NewMember, RoleChange
from api.routes.openai.bodies import (
    ChatBody,
    ChatTokensBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from api.routes.payments import TopUp
from api.routes.projects import NewProject, ProjectChange
from api.server.app import front

#: Paths, below /api/v1 if they are there, whose body is JSON, and its type.
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
    "/weft/budgets": SetBudgetRequest,
    "/weft/billing/topups": TopUp,
    "/weft/keys": NewKey,
    "/weft/keys/{key_id}/rotate": Rotation,
    "/weft/members": NewMember,
    "/weft/members/{user_id}": RoleChange,
    "/weft/projects": NewProject,
    "/weft/projects/{project_id}": ProjectChange,
    "/weft/rate_limits/{scope}/{id}": NewLimits,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/chat/completions/tokens": ChatTokensBody,
    "/inference/v1/generate": GenerateBody,
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), TokenizeBody),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), DetokenizeBody),
}
#: POST, PUT and PATCH without a body, or with one that is not JSON.
NO_JSON = {
    "/auth/token",
    "/forward_backward",
    "/forward",
    "/training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
    "/stripe/webhook",
}
PREFIX = "/api/v1"
#: What other APIs' clients call.
DOORS = ("/v1/", "/inference/", "/tokenize", "/detokenize")


def document() -> dict[str, Any]:
    """The whole API, without the console. Fails for a route that takes a body and is not named here."""
    described = copy.deepcopy(front().openapi())
    described["paths"] = {
        path: found for path, found in described["paths"].items() if path.startswith((PREFIX, *DOORS))
    }
    for path, operations in described["paths"].items():
        name = path.removeprefix(PREFIX)
        for method in ("post", "put", "patch"):
            if method in operations and name not in NO_JSON:
                schema = _plain(BODIES[name].model_json_schema(ref_template="#/components/schemas/{model}"))
                described.setdefault("components", {}).setdefault("schemas", {}).update(schema.pop("$defs", {}))
                operations[method]["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
    return described


def _plain(schema: Any) -> Any:
    """Without `binary`, for which generators make bytes that no JSON can hold."""
    if isinstance(schema, dict):
        return {key: _plain(value) for key, value in schema.items() if (key, value) != ("format", "binary")}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema
