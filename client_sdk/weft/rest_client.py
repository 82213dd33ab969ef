"""`RestClient`: what is stored and what it cost. Needs no session."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from weft.endpoint import resolve_endpoint
from weft.future import APIFuture
from weft.retry import RetryPolicy
from weft.transport import Call, Transport, encode
from weft.wire.rest import (
    AccessScope,
    CheckpointsListResponse,
    ExternalWeightsUrlsResponse,
    GetSessionResponse,
    ListSessionsResponse,
    SetTtlRequest,
    TrainingRun,
    TrainingRunsResponse,
    parse_checkpoint_path,
)
from weft.wire.sampling import GetSamplerResponse
from weft.wire.service import GetServerCapabilitiesResponse
from weft.wire.training import ModelID
from weft.wire.usage import Stats, UsageResponse
from weft.wire.weights import WeightsInfoRequest, WeightsInfoResponse

M = TypeVar("M", bound=BaseModel)


class RestClient:
    """Every method returns a future at once. A foreign or unknown id is `NotFoundError`."""

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        policy: RetryPolicy | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._transport = transport or Transport(resolve_endpoint(base_url, api_key), policy or RetryPolicy())

    def _get(self, path: str, answer: type[M], **params: Any) -> APIFuture[M]:
        given = {name: value for name, value in params.items() if value is not None}
        return APIFuture.start(self._transport.ask("GET", path, answer, params=given or None))

    def _do(self, method: str, path: str, body: bytes | None = None) -> APIFuture[None]:
        return APIFuture.start(self._act(Call(method, path, body)))

    async def _act(self, call: Call) -> None:
        await self._transport.send(call)

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """The base models that the server serves."""
        return self._get("/get_server_capabilities", GetServerCapabilitiesResponse)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """Runs, newest first; `cursor.total_count` says how many there are."""
        scope = {"access_scope": access_scope, "project_id": project_id}
        return self._get("/training_runs", TrainingRunsResponse, limit=limit, offset=offset, **scope)

    def get_training_run(self, training_run_id: ModelID, access_scope: AccessScope = "owned") -> APIFuture[TrainingRun]:
        """One run."""
        return self._get(f"/training_runs/{_part(training_run_id)}", TrainingRun, access_scope=access_scope)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """The run that a checkpoint comes from."""
        return self.get_training_run(parse_checkpoint_path(tinker_path).training_run_id, access_scope)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """Base model and adapter shape of a checkpoint."""
        body = encode(WeightsInfoRequest(tinker_path=tinker_path).body())
        return APIFuture.start(self._transport.ask("POST", "/weights_info", WeightsInfoResponse, body))

    def list_checkpoints(self, training_run_id: ModelID) -> APIFuture[CheckpointsListResponse]:
        """All checkpoints of a run."""
        return self._get(f"/training_runs/{_part(training_run_id)}/checkpoints", CheckpointsListResponse)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointsListResponse]:
        """Checkpoints of all runs, newest first."""
        return self._get("/checkpoints", CheckpointsListResponse, limit=limit, offset=offset)

    def delete_checkpoint(self, training_run_id: ModelID, checkpoint_id: str) -> APIFuture[None]:
        """Delete `checkpoint_id`, which is `<kind>/<name>`."""
        return self.delete_checkpoint_from_tinker_path(f"tinker://{training_run_id}/{checkpoint_id}")

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint."""
        return self._do("DELETE", _checkpoint(tinker_path))

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let everybody load a checkpoint."""
        return self._do("POST", f"{_checkpoint(tinker_path)}/publish")

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Keep a checkpoint to ourselves again."""
        return self._do("DELETE", f"{_checkpoint(tinker_path)}/publish")

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> APIFuture[None]:
        """Let a checkpoint expire `ttl_seconds` (an hour to ten years) from now, or never (None)."""
        body = encode(SetTtlRequest(ttl_seconds=ttl_seconds).body())
        return self._do("PUT", f"{_checkpoint(tinker_path)}/ttl", body)

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """Where to fetch the files of an exported checkpoint, one signed URL each."""
        return self._get(f"{_checkpoint(tinker_path)}/external_weights_urls", ExternalWeightsUrlsResponse)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """Ids of sessions, newest first."""
        return self._get("/sessions", ListSessionsResponse, limit=limit, offset=offset, access_scope=access_scope)

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> APIFuture[GetSessionResponse]:
        """The runs and samplers of a session."""
        return self._get(f"/sessions/{_part(session_id)}", GetSessionResponse, access_scope=access_scope)

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        """What a sampler draws from."""
        return self._get(f"/samplers/{_part(sampler_id)}", GetSamplerResponse)

    def get_usage(self, run_id: str | None = None) -> APIFuture[UsageResponse]:
        """Tokens and money, by run and kind; of one run if `run_id` is given."""
        return self._get("/weft/usage", UsageResponse, run_id=run_id)

    def get_stats(self) -> APIFuture[Stats]:
        """How the server is doing: passes, shared passes, slot occupancy, queue."""
        return APIFuture.start(self._stats())

    async def _stats(self) -> Stats:
        stats: Stats = (await self._transport.send(Call("GET", "/weft/stats"))).json()
        return stats

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """For every method `x` there is `x_async`, which is awaited for the result itself."""
        method = getattr(type(self), name.removesuffix("_async"), None) if name.endswith("_async") else None
        if method is None:
            raise AttributeError(f"RestClient has no attribute {name!r}")

        async def twin(*args: Any, **kwargs: Any) -> Any:
            return await method(self, *args, **kwargs)

        return twin

    def close(self) -> APIFuture[None]:
        """Close the connections."""
        return APIFuture.start(self._transport.close())


def _part(name: str) -> str:
    """An id as one part of a path; colons stay readable."""
    return quote(name, safe=":")


def _checkpoint(tinker_path: str) -> str:
    run_id, kind, name = parse_checkpoint_path(tinker_path)
    return f"/training_runs/{_part(run_id)}/checkpoints/{kind}/{_part(name)}"
