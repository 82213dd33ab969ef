"""Bodies of the service itself: configuration, sessions, capabilities, futures, telemetry, errors."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from weft.wire.base import CloneId, Instant, Request, Response, SampleSeq

__all__ = [
    "AuthTokenResponse",
    "CancelFutureRequest",
    "ClientConfigRequest",
    "ClientConfigResponse",
    "ClientDynamicConfigResponse",
    "CreateSessionRequest",
    "CreateSessionResponse",
    "FinishReason",
    "FinishSessionRequest",
    "FinishType",
    "FutureCompletion",
    "FutureFailed",
    "FutureFinished",
    "FutureRetrieveRequest",
    "FuturesRetrieveRequest",
    "FuturesRetrieveResponse",
    "GetServerCapabilitiesResponse",
    "HealthResponse",
    "JoinSamplingSessionRequest",
    "JoinSamplingSessionResponse",
    "QueueState",
    "RequestErrorCategory",
    "RequestFailedResponse",
    "RequestID",
    "SamplingSessionFuturesTarget",
    "SessionHeartbeatRequest",
    "SessionHeartbeatResponse",
    "StreamFutureRequest",
    "SupportedModel",
    "TelemetryResponse",
    "TelemetrySendRequest",
    "TryAgainResponse",
    "UntypedAPIFuture",
]

RequestID = str


class ClientConfigRequest(Request):
    sdk_version: str


class ClientConfigResponse(Response):
    """What a server tells a client about how to behave. The client `weft` uses the chunk limits, the billing pause,
    `sample_max_concurrent_requests`, and whether the server takes `heard_of` with a step (a field of ours); the other
    fields are for Tinker's client."""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False
    optim_step_heard_of: bool = False


class ClientDynamicConfigResponse(Response):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class CreateSessionRequest(Request):
    tags: list[str] = Field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Response):
    type: Literal["create_session"] = "create_session"
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class SessionHeartbeatRequest(Request):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Response):
    type: Literal["session_heartbeat"] = "session_heartbeat"


FinishType = Literal["success", "errored", "interrupted"]


class FinishReason(Request):
    type: FinishType


class FinishSessionRequest(Request):
    """How a session ended. `detail` is sent even when it is null."""

    reason: FinishReason
    detail: str | None = None

    def body(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class SupportedModel(Response):
    """A base model that this server serves, and what for."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class GetServerCapabilitiesResponse(Response):
    supported_models: list[SupportedModel]


class HealthResponse(Response):
    status: Literal["ok"] = "ok"


class UntypedAPIFuture(Response):
    """The answer to every submitted operation: where its result will be. Samples also name their sequences. `refused`
    says why the result will be a failure, where that is known already."""

    request_id: RequestID
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
    refused: str | None = None


class FutureRetrieveRequest(Request):
    request_id: RequestID
    allow_metadata_only: bool = False


class SamplingSessionFuturesTarget(Request):
    """To wait for the requests of one sampler, or of one of its clones (0: the original)."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: CloneId = 0


class FuturesRetrieveRequest(Request):
    """Wait for any request of `target` to complete after `prev_cursor`; a `timeout` of 0 only acknowledges.

    `retrieved_request_ids` are results that the client has, which the server need not keep.
    """

    target: SamplingSessionFuturesTarget
    prev_cursor: Instant = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = Field(default_factory=list, fail_fast=True)


class FutureFinished(Response):
    state: Literal["finished"] = "finished"
    request_id: RequestID
    response_payload_uncompressed_size: int | None = None


class FutureFailed(Response):
    state: Literal["failed"] = "failed"
    request_id: RequestID


FutureCompletion = Annotated[FutureFinished | FutureFailed, Field(discriminator="state")]


class FuturesRetrieveResponse(Response):
    """The requests that have completed; their results are fetched one by one. `cursor` goes into the next request."""

    completions: list[FutureCompletion]
    cursor: int


class AuthTokenResponse(Response):
    jwt: str


class CancelFutureRequest(Request):
    request_id: RequestID


class StreamFutureRequest(Request):
    """`timeout`: seconds after which the server ends the stream although the sample goes on."""

    request_id: RequestID
    timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class TryAgainResponse(Response):
    """Not finished yet; sent with status 408."""

    type: Literal["try_again"] = "try_again"
    request_id: RequestID
    queue_state: QueueState = "active"
    queue_state_reason: str | None = None


class RequestErrorCategory(StrEnum):
    UNKNOWN = "unknown"
    SERVER = "server"
    USER = "user"


class RequestFailedResponse(Response):
    """A failed operation. Final: an operation that has failed stays so."""

    error: str
    category: RequestErrorCategory = RequestErrorCategory.UNKNOWN
    request_id: RequestID | None = None


class TelemetrySendRequest(Request):
    """Events of a client. Weft stores none of them, so they are not modelled further."""

    events: list[dict[str, Any]]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str


class TelemetryResponse(Response):
    status: Literal["accepted"] = "accepted"


class JoinSamplingSessionRequest(Request):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Response):
    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: SampleSeq


class StatusResponse(Response):
    """What became of the thing that was asked for: published, unpublished, deleted, removed, finished or revoked; of a
    readiness probe, "ready" or why not."""

    status: str


class CancelFutureResponse(Response):
    """`cancelled`: true if there was a running sample to end."""

    cancelled: bool


class FutureMetadataResponse(Response):
    """A result too large to send unasked, for `allow_metadata_only`: its size, in bytes."""

    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


class OrgDetails(Response):
    name: str


class UserDetails(Response):
    """`email` is empty for a key of the organisation itself."""

    email: str


class KeyOwner(Response):
    org_details: OrgDetails
    user_details: UserDetails


class ApiKeyMeResponse(Response):
    """The key that asks. `name` is its public prefix."""

    key_id: int | None
    name: str
    note: str = ""
    details: KeyOwner
