"""Bodies of listing and managing what is stored: runs, checkpoints, sessions."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, NamedTuple

from pydantic import Field

from weft.wire.base import Integer, Request, Response, UserMetadata
from weft.wire.error import WireError
from weft.wire.training import ModelID

__all__ = [
    "AccessScope",
    "Checkpoint",
    "CheckpointArchiveUrlResponse",
    "CheckpointType",
    "CheckpointsListResponse",
    "Cursor",
    "ExternalWeightsUrlsResponse",
    "GetSessionResponse",
    "ListSessionsResponse",
    "ParsedCheckpointTinkerPath",
    "RunNotes",
    "SetNotesRequest",
    "SetTtlRequest",
    "TrainingRun",
    "TrainingRunsResponse",
    "parse_checkpoint_path",
]

CheckpointType = Literal["training", "sampler", "external"]
AccessScope = Literal["owned", "accessible"]

#: The folder of a checkpoint in its path, and the checkpoint's type.
CHECKPOINT_TYPES: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}

_SCHEME = "tinker://"


class CheckpointPath(NamedTuple):
    """The parts of `tinker://{run}/{kind}/{name}`."""

    training_run_id: ModelID
    kind: str
    name: str


def parse_checkpoint_path(path: str) -> CheckpointPath:
    """Split `tinker://{run}/{kind}/{name}`; `WireError` for anything else."""
    parts = path.removeprefix(_SCHEME).split("/")
    if not path.startswith(_SCHEME) or len(parts) != 3 or not all(parts) or parts[1] not in CHECKPOINT_TYPES:
        kinds = "|".join(CHECKPOINT_TYPES)
        raise WireError(f"{path!r} is not a checkpoint path; it should read tinker://<run>/<{kinds}>/<name>")
    return CheckpointPath(*parts)


class ParsedCheckpointTinkerPath(Response):
    """A checkpoint path, taken apart; `checkpoint_id` is `{kind}/{name}`."""

    tinker_path: str
    training_run_id: ModelID
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> ParsedCheckpointTinkerPath:
        """`WireError` (a `ValueError`) if it is not a checkpoint path."""
        run_id, kind, name = parse_checkpoint_path(tinker_path)
        return cls(
            tinker_path=tinker_path,
            training_run_id=run_id,
            checkpoint_type=CHECKPOINT_TYPES[kind],
            checkpoint_id=f"{kind}/{name}",
        )


class Cursor(Response):
    offset: int
    limit: int
    total_count: int


class Checkpoint(Response):
    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: UserMetadata | None = None
    expires_at: datetime | None = None
    base_model: str | None = None


class CheckpointsListResponse(Response):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Response):
    training_run_id: ModelID
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: UserMetadata | None = None

    @property
    def name(self) -> str | None:
        """The run's name in its metadata."""
        return (self.user_metadata or {}).get("name")

    @property
    def continued_from(self) -> str | None:
        """The checkpoint that the run was started from."""
        return (self.user_metadata or {}).get("continued_from")


class TrainingRunsResponse(Response):
    training_runs: list[TrainingRun]
    cursor: Cursor


class SetTtlRequest(Request):
    """Null means never expire, and is sent."""

    ttl_seconds: Integer | None

    def body(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class ExternalWeightsUrlsResponse(Response):
    """One signed URL per file of an exported checkpoint."""

    urls: dict[str, str]
    expires: datetime


class CheckpointArchiveUrlResponse(Response):
    """A signed URL of a checkpoint's archive."""

    url: str
    expires: datetime | None = None


class ListSessionsResponse(Response):
    sessions: list[str]
    cursor: Cursor | None = None


class GetSessionResponse(Response):
    training_run_ids: list[ModelID]
    sampler_ids: list[str]
    user_metadata: UserMetadata | None = None
    display_name: str | None = None
    project_id: str | None = None
    tags: list[str] = Field(default_factory=list)


class SetTtlResponse(Response):
    """The time at which the checkpoint expires; null: never."""

    expires_at: datetime | None


class SetNotesRequest(Request):
    """Notes that people write about a run. At most 4,096 characters; empty takes the notes away."""

    notes: str


class RunNotes(Response):
    notes: str
