"""Bodies of saving, loading and describing weights."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from weft.wire.base import Count, Request, Response, TrainSeq, UserMetadata
from weft.wire.training import AdamOptimizerConfig, ModelID, OptimizerConfig

__all__ = [
    "CheckpointName",
    "CopyWeightsRequest",
    "CopyWeightsResponse",
    "LoadWeightsRequest",
    "LoadWeightsResponse",
    "SamplingClientKind",
    "SaveWeightsExternalRequest",
    "SaveWeightsExternalResponse",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsForSamplerResponseInternal",
    "SaveWeightsRequest",
    "SaveWeightsResponse",
    "TtlSeconds",
    "WeightsInfoRequest",
    "WeightsInfoResponse",
]

SamplingClientKind = Literal["snapshot", "inflight"]

#: A name becomes the last part of a checkpoint's path.
NAME_PATTERN = r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$"


def _named(name: str) -> str:
    """The constraint in words: a pattern does not tell anybody what to do."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise PydanticCustomError("name", "Must be of A-Z, a-z, 0-9, '_', '-' and '.', and not of dots alone")
    return name


CheckpointName = Annotated[
    str,
    Field(min_length=1, max_length=256, json_schema_extra={"pattern": NAME_PATTERN}),
    AfterValidator(_named),
]
#: A time to live: an hour to ten years.
TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 366 * 24 * 3600)]


class SaveWeightsRequest(Request):
    """Save adapter and optimizer as `weights/{path}`."""

    model_id: ModelID
    path: CheckpointName | None = None
    seq_id: TrainSeq | None = None
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: UserMetadata | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Response):
    path: str
    type: Literal["save_weights"] | None = None


class SaveWeightsForSamplerRequest(Request):
    """Save the adapter: as `sampler_weights/{path}`, or, without a path, as the ephemeral sampler of that number."""

    model_id: ModelID
    path: CheckpointName | None = None
    sampling_session_seq_id: Count | None = None
    kind: SamplingClientKind = "snapshot"
    seq_id: TrainSeq | None = None
    ttl_seconds: TtlSeconds | None = None
    user_metadata: UserMetadata | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    @model_validator(mode="after")
    def _one_target(self) -> SaveWeightsForSamplerRequest:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give exactly one of path and sampling_session_seq_id")
        return self


class SaveWeightsForSamplerResponse(Response):
    """The answer that a user gets for a named save."""

    path: str
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsForSamplerResponseInternal(Response):
    """The server's answer to a save: `path` for a named save, `sampling_session_id` for an ephemeral one."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsExternalRequest(Request):
    """Export the adapter as PEFT files, `external_weights/{path}`."""

    model_id: ModelID
    path: CheckpointName
    seq_id: TrainSeq | None = None
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: Annotated[list[str], Field(max_length=10)] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(Response):
    path: str
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class LoadWeightsRequest(Request):
    """Load a checkpoint into an existing run (`model_id`, `seq_id`) or make a run from it (`session_id`,
    `model_seq_id`); with `optimizer`, its optimizer state too."""

    path: str
    optimizer: bool
    model_id: ModelID | None = None
    seq_id: TrainSeq | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"

    @model_validator(mode="after")
    def _one_target(self) -> LoadWeightsRequest:
        in_place = self.model_id is not None
        new_run = self.session_id is not None and self.model_seq_id is not None
        if in_place == new_run or (in_place and (self.session_id is not None or self.model_seq_id is not None)):
            raise ValueError("give either model_id (and seq_id), or session_id and model_seq_id")
        return self


class LoadWeightsResponse(Response):
    path: str | None = None
    model_id: ModelID | None = None
    type: Literal["load_weights"] | None = None


class WeightsInfoRequest(Request):
    tinker_path: str


class WeightsInfoResponse(Response):
    """The properties that a run needs to load this checkpoint."""

    base_model: str
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class CopyWeightsRequest(Request):
    """Copy a checkpoint into a project, or into a run of a session."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    ttl_seconds: TtlSeconds | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(Response):
    tinker_path: str
