"""`RestClient`: stored runs and checkpoints, their cost, sessions, and whose key is used; `AdminClient`: what
administrators of an organisation may ask. Neither needs a session."""

from __future__ import annotations

import asyncio
import os
import tempfile
from datetime import date, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from weft.errors import APIResponseValidationError, RequestFailedError
from weft.exports.folder import finish, made
from weft.exports.layout import Layout, selected
from weft.future import APIFuture, twin
from weft.transport.download import download_archive, download_files
from weft.transport.http import Call, Transport, encode, resolve_endpoint
from weft.transport.retry import RetryPolicy
from weft.wire.account.billing import (
    AuditEventType,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
)
from weft.wire.account.limits import BalanceResponse, LimitsResponse, PricesResponse
from weft.wire.account.money import BudgetsResponse, LedgerResponse
from weft.wire.account.usage import Stats, UsageResponse
from weft.wire.base import Request
from weft.wire.health import RunHealthResponse
from weft.wire.rest import (
    AccessScope,
    CheckpointArchiveUrlResponse,
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
from weft.wire.sessions import (
    AssignProjectRequest,
    SessionSearchRequest,
    SessionSearchResponse,
    TraceExportResponse,
    WhoamiResponse,
)
from weft.wire.shown import arguments
from weft.wire.training import ModelID
from weft.wire.turns import TurnsResponse
from weft.wire.weights import CopyWeightsRequest, CopyWeightsResponse, WeightsInfoRequest, WeightsInfoResponse

M = TypeVar("M", bound=BaseModel)

TRACE_POLL_S = 2.0


class RestBase:
    """Every method returns a future at once. A foreign or unknown id is `NotFoundError`."""

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        policy: RetryPolicy | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._own = transport is None
        self._transport = transport or Transport(resolve_endpoint(base_url, api_key), policy or RetryPolicy())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.endpoint.base_url!r})"

    def _get(self, path: str, answer: type[M], **params: Any) -> APIFuture[M]:
        given = {name: value for name, value in params.items() if value is not None}
        return APIFuture.start(self._transport.ask("GET", path, answer, params=given or None))

    def _post(self, path: str, answer: type[M], body: Request) -> APIFuture[M]:
        return APIFuture.start(self._transport.ask("POST", path, answer, encode(body.body())))

    def _do(self, method: str, path: str, body: Request | None = None) -> APIFuture[None]:
        return APIFuture.start(self._act(Call(method, path, None if body is None else encode(body.body()))))

    async def _act(self, call: Call) -> None:
        await self._transport.send(call)

    def close(self) -> APIFuture[None]:
        """Close this client's own connections. Connections shared with the client that made it stay open."""
        return APIFuture.start(self._close())

    async def _close(self) -> None:
        if self._own:
            await self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close().result()

    close_async = twin(close)


class AdminClient(RestBase):
    """Every method returns a future at once. A key without the role is `PermissionDeniedError`."""

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: date | None = None, offset: int = 0
    ) -> APIFuture[AuditLogResponse]:
        """What happened on `day` (today if None), midnight to midnight UTC. If the answer is `truncated`, ask again
        with `offset` raised by the number of its entries."""
        when = None if day is None else day.isoformat()
        return self._get("/audit", AuditLogResponse, event_type=event_type, day=when, offset=offset or None)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Usage by the hour; both ends on the hour in UTC, at most 14 days apart. `RestClient.get_usage` is exact."""
        window = GetBillingUsageRequest.model_validate({"starting_on": starting_on, "ending_before": ending_before})
        return self._get("/billing/usage/events", BillingUsageResponse, **window.body())

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """How much the checkpoints take now, of everything or of one project."""
        route = "/billing/usage/checkpoints/current"
        return self._get(route, CurrentCheckpointStorageUsageResponse, project_id=project_id)

    get_audit_log_async = twin(get_audit_log)
    get_billing_usage_async = twin(get_billing_usage)
    get_current_checkpoint_storage_usage_async = twin(get_current_checkpoint_storage_usage)


class RestClient(AdminClient):
    """Every method returns a future at once. A foreign or unknown id is `NotFoundError`."""

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
        return self._get(f"/training_runs/{part(training_run_id)}", TrainingRun, access_scope=access_scope)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """The run that a checkpoint comes from."""
        return self.get_training_run(parse_checkpoint_path(tinker_path).training_run_id, access_scope)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """Base model and adapter shape of a checkpoint."""
        return self._post("/weights_info", WeightsInfoResponse, WeightsInfoRequest(tinker_path=tinker_path))

    def list_checkpoints(self, training_run_id: ModelID) -> APIFuture[CheckpointsListResponse]:
        """All checkpoints of a run."""
        return self._get(f"/training_runs/{part(training_run_id)}/checkpoints", CheckpointsListResponse)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointsListResponse]:
        """Checkpoints of all runs, newest first."""
        return self._get("/checkpoints", CheckpointsListResponse, limit=limit, offset=offset)

    def delete_checkpoint(self, training_run_id: ModelID, checkpoint_id: str) -> APIFuture[None]:
        """Delete `checkpoint_id`, which is `<kind>/<name>`."""
        return self.delete_checkpoint_from_tinker_path(f"tinker://{training_run_id}/{checkpoint_id}")

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint."""
        return self._do("DELETE", checkpoint_route(tinker_path))

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let everybody load a checkpoint."""
        return self._do("POST", f"{checkpoint_route(tinker_path)}/publish")

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Keep a checkpoint to ourselves again."""
        return self._do("DELETE", f"{checkpoint_route(tinker_path)}/publish")

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> APIFuture[None]:
        """Let a checkpoint expire `ttl_seconds` (an hour to ten years) from now, or never (None)."""
        with arguments():
            request = SetTtlRequest(ttl_seconds=ttl_seconds)
        return self._do("PUT", f"{checkpoint_route(tinker_path)}/ttl", request)

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """The signed URLs of the files of an exported checkpoint, one for each file."""
        return self._get(f"{checkpoint_route(tinker_path)}/external_weights_urls", ExternalWeightsUrlsResponse)

    def get_checkpoint_archive_url_from_tinker_path(self, tinker_path: str) -> APIFuture[CheckpointArchiveUrlResponse]:
        """The signed URL of a tar of a run's state or sampler weights, as PEFT files."""
        return APIFuture.start(self._archive_url(tinker_path))

    async def _archive_url(self, tinker_path: str) -> CheckpointArchiveUrlResponse:
        call = Call("GET", f"{checkpoint_route(tinker_path)}/archive", redirected=True, timeout_s=600.0)
        response = await self._transport.send(call)
        if "location" not in response.headers:
            raise APIResponseValidationError(f"the server does not say where the archive of {tinker_path} is")
        expires = response.headers.get("expires")
        when = None if expires is None else parsedate_to_datetime(expires)
        return CheckpointArchiveUrlResponse(url=str(response.url.join(response.headers["location"])), expires=when)

    def download_checkpoint(
        self, tinker_path: str, folder: str | Path, layout: Layout = "peft", *, leave_out_unembedding: bool = False
    ) -> APIFuture[list[Path]]:
        """Fetch any checkpoint's adapter into `folder`, as its reader needs it; the paths of the files.

        "peft" is what stock PEFT loads, "vllm" what vLLM loads (an adapter that trains the unembedding is refused,
        unless `leave_out_unembedding` leaves that part out), "tinker" what Tinker's cookbook reads. The first two come
        with README.md and verify.py. `ExportError` if it cannot be had so.
        """
        return APIFuture.start(self._download(tinker_path, Path(folder), layout, leave_out_unembedding))

    async def _download(self, path: str, folder: Path, layout: Layout, leave_out_unembedding: bool) -> list[Path]:
        with made(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".download.") as scratch:
            part = Path(scratch)
            if parse_checkpoint_path(path).kind != "external_weights":
                url = (await self._archive_url(path)).url
                await download_archive(url, part, lambda names: selected(names, layout))
            else:
                urls = (await self.get_external_weights_urls(path)).urls
                await download_files({to: urls[name] for name, to in selected(urls, layout).items()}, part)
            return await asyncio.to_thread(finish, part, folder, path, layout, leave_out_unembedding)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint, ours or a published one, into a project (else WEFT_PROJECT_ID); the copy's path.

        The copy keeps its kind, shares the bytes, expires by itself after `ttl_seconds`, and cannot be trained on.
        """
        project = destination_project_id or os.environ.get("WEFT_PROJECT_ID") or os.environ.get("TINKER_PROJECT_ID")
        if not project:
            raise ValueError("copy_weights needs destination_project_id, or WEFT_PROJECT_ID in the environment")
        with arguments(source_path="path"):
            request = CopyWeightsRequest(source_path=path, destination_project_id=project, ttl_seconds=ttl_seconds)
        return APIFuture.start(self._copy(request, weights_access_token))

    async def _copy(self, request: CopyWeightsRequest, token: str | None) -> str:
        headers = {"X-Tinker-Weights-Access-Token": token} if token else None
        body = encode(request.body())
        copied = await self._transport.ask("POST", "/copy_weights", CopyWeightsResponse, body, headers=headers)
        return copied.tinker_path

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """Ids of sessions, newest first."""
        return self._get("/sessions", ListSessionsResponse, limit=limit, offset=offset, access_scope=access_scope)

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> APIFuture[GetSessionResponse]:
        """The runs and samplers of a session."""
        return self._get(f"/sessions/{part(session_id)}", GetSessionResponse, access_scope=access_scope)

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """One page of sessions that match, newest first; its `next_cursor` is the next request's `cursor`."""
        return self._post("/sessions/search", SessionSearchResponse, request)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session, with its runs and samplers, into a project."""
        return self._do("PUT", f"/sessions/{part(session_id)}/project", AssignProjectRequest(project_id=project_id))

    def export_session_trace(self, session_id: str) -> APIFuture[str]:
        """The URL of a trace of the session's operations, for ui.perfetto.dev; fetched without credentials."""
        return APIFuture.start(self._export_session_trace(session_id))

    async def _export_session_trace(self, session_id: str) -> str:
        route = f"/sessions/{part(session_id)}/trace_export"
        while True:
            export = await self._transport.ask("GET", route, TraceExportResponse)
            if export.status == "ready" and export.url:
                return export.url
            if export.status != "pending":
                raise RequestFailedError(f"trace of session {session_id}: {export.error}", session_id, "server")
            await asyncio.sleep(TRACE_POLL_S)

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        """The base model and weights that a sampler draws from."""
        return self._get(f"/samplers/{part(sampler_id)}", GetSamplerResponse)

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Whose credential this is, read from the token that the server gives for it."""
        return APIFuture.start(self._transport.identity())

    def get_usage(self, run_id: str | None = None) -> APIFuture[UsageResponse]:
        """Tokens and money, by run and kind; of one run if `run_id` is given."""
        return self._get("/weft/usage", UsageResponse, run_id=run_id)

    def get_balance(self) -> APIFuture[BalanceResponse]:
        """What was spent, ever and this month, and what is left; `balance_nusd` is None if nothing limits it."""
        return self._get("/weft/balance", BalanceResponse)

    def get_budgets(self) -> APIFuture[BudgetsResponse]:
        """Budgets of the organisation, its projects and keys, as they are now."""
        return self._get("/weft/budgets", BudgetsResponse)

    def get_ledger(self, before: int | None = None) -> APIFuture[LedgerResponse]:
        """Movements of the balance, the newest first; those before entry `before` if it is given."""
        return self._get("/weft/ledger", LedgerResponse, before=None if before is None else str(before))

    def get_prices(self, base_model: str) -> APIFuture[PricesResponse]:
        """The rates that hold now for a base model."""
        return self._get("/weft/prices", PricesResponse, model=base_model)

    def get_limits(self) -> APIFuture[LimitsResponse]:
        """The limits of what the server accepts."""
        return self._get("/weft/limits", LimitsResponse)

    def get_run_health(self, run_id: str, window_s: float = 3600) -> APIFuture[RunHealthResponse]:
        """How the loop of a run is doing: who waits, tokens per second, acceptance, staleness, what it waits for."""
        return self._get(f"/weft/runs/{run_id}/health", RunHealthResponse, window_s=str(window_s))

    def get_turns(self, session: str, after: int = 0, limit: int = 64) -> APIFuture[TurnsResponse]:
        """What was sampled under `X-Session-ID: session` (docs/openai.md): the turns of `limit` requests after `after`,
        which is 0 or the `next` of the answer before."""
        return self._get(f"/weft/turns/{quote(session)}", TurnsResponse, after=str(after), limit=str(limit))

    def get_stats(self) -> APIFuture[Stats]:
        """How the server is doing: passes, shared passes, slot occupancy, queue."""
        return self._get("/weft/stats", Stats)

    get_server_capabilities_async = twin(get_server_capabilities)
    list_training_runs_async = twin(list_training_runs)
    get_training_run_async = twin(get_training_run)
    get_training_run_by_tinker_path_async = twin(get_training_run_by_tinker_path)
    get_weights_info_by_tinker_path_async = twin(get_weights_info_by_tinker_path)
    list_checkpoints_async = twin(list_checkpoints)
    list_user_checkpoints_async = twin(list_user_checkpoints)
    delete_checkpoint_async = twin(delete_checkpoint)
    delete_checkpoint_from_tinker_path_async = twin(delete_checkpoint_from_tinker_path)
    publish_checkpoint_from_tinker_path_async = twin(publish_checkpoint_from_tinker_path)
    unpublish_checkpoint_from_tinker_path_async = twin(unpublish_checkpoint_from_tinker_path)
    set_checkpoint_ttl_from_tinker_path_async = twin(set_checkpoint_ttl_from_tinker_path)
    get_external_weights_urls_async = twin(get_external_weights_urls)
    get_checkpoint_archive_url_from_tinker_path_async = twin(get_checkpoint_archive_url_from_tinker_path)
    download_checkpoint_async = twin(download_checkpoint)
    copy_weights_async = twin(copy_weights)
    list_sessions_async = twin(list_sessions)
    get_session_async = twin(get_session)
    search_sessions_async = twin(search_sessions)
    assign_session_project_async = twin(assign_session_project)
    export_session_trace_async = twin(export_session_trace)
    get_sampler_async = twin(get_sampler)
    whoami_async = twin(whoami)
    get_usage_async = twin(get_usage)
    get_balance_async = twin(get_balance)
    get_budgets_async = twin(get_budgets)
    get_ledger_async = twin(get_ledger)
    get_prices_async = twin(get_prices)
    get_limits_async = twin(get_limits)
    get_run_health_async = twin(get_run_health)
    get_turns_async = twin(get_turns)
    get_stats_async = twin(get_stats)


def part(name: str) -> str:
    """An id as one part of a URL path; colons stay readable. ValueError for "." and "..", which URLs resolve away."""
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no id or name: give one that the server has listed")
    return quote(name, safe=":")


def checkpoint_route(tinker_path: str) -> str:
    """The route under which a checkpoint is managed."""
    run_id, kind, name = parse_checkpoint_path(tinker_path)
    return f"/training_runs/{part(run_id)}/checkpoints/{kind}/{part(name)}"
