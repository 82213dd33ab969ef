"""Sessions and what they own: runs, samplers, checkpoints; and the journal of operations."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, BigInt

#: How many characters people may write about a run.
MAX_NOTES = 4096


class Session(Base):
    """One client process: the owner of runs and samplers. `state` is active | finished | expired; `key_id` is the key
    that made it, which is what "owned" means."""

    __tablename__ = "sessions"
    __table_args__ = (
        Index("ix_sessions_org_state", "org_id", "state"),
        Index("ix_sessions_org_ended", "org_id", "ended_at"),
        Index("ix_sessions_state", "state"),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    state: Mapped[str] = mapped_column(String(16))
    sdk_version: Mapped[str] = mapped_column(String(64))
    display_name: Mapped[str | None] = mapped_column(String(256))
    project_id: Mapped[str | None] = mapped_column(String(64))
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, Any]]
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    finish_detail: Mapped[str | None] = mapped_column(String(4096))
    key_id: Mapped[int | None] = mapped_column(BigInteger)
    user_id: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class Run(Base):
    """One training run: an adapter on a base model. `snapshot_ref` holds its whole state right after operation
    `snapshot_seq`; later operations are replayed from the journal to rebuild it. `snapshot_part` says what it holds of
    the operation after that one (`scheduler.links.messages.Snapshot`). `broken` says why the run can do nothing more.
    `state` is live | closed."""

    __tablename__ = "runs"
    __table_args__ = (Index("ix_runs_org_state", "org_id", "state"), Index("ix_runs_state", "state"))
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), index=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    model_seq_id: Mapped[int]
    base_model: Mapped[str] = mapped_column(String(256))
    rank: Mapped[int]
    alpha: Mapped[float]
    seed: Mapped[int] = mapped_column(BigInteger)
    train_attn: Mapped[bool]
    train_mlp: Mapped[bool]
    train_unembed: Mapped[bool]
    optimizer: Mapped[str] = mapped_column(String(16), server_default="adamw")
    state: Mapped[str] = mapped_column(String(16))
    snapshot_seq: Mapped[int | None] = mapped_column(BigInteger)
    snapshot_ref: Mapped[str | None] = mapped_column(String(256))
    snapshot_part: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    broken: Mapped[str | None] = mapped_column(String(4096))
    user_metadata: Mapped[dict[str, Any]]
    notes: Mapped[str | None] = mapped_column(String(MAX_NOTES))  # what people write about it
    created_at: Mapped[datetime]
    last_request_at: Mapped[datetime]

    @property
    def shown_state(self) -> str:
        """The state as people are shown it: live, broken or closed."""
        return "broken" if self.broken is not None and self.state == "live" else self.state


class Sampler(Base):
    """What a sampling client samples from: a base model, with the adapter in `adapter_ref` where there is one.
    `kind` is snapshot (never changes) | inflight (follows `run_id`) | base; `clients` counts those that joined it."""

    __tablename__ = "samplers"
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), index=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    sampling_session_seq_id: Mapped[int]
    base_model: Mapped[str] = mapped_column(String(256))
    model_path: Mapped[str | None] = mapped_column(String(512))
    adapter_ref: Mapped[str] = mapped_column(String(256), index=True)
    run_id: Mapped[str | None] = mapped_column(String(128), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    clients: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[datetime]


class SessionTurn(Base):
    """A request that was sampled under its client's own session id `name`; the blob `ref` has prompt and tokens,
    `size_bytes` when it is unpacked."""

    __tablename__ = "session_turns"
    __table_args__ = (Index("ix_session_turns_name", "org_id", "name", "id"),)
    id: Mapped[int] = mapped_column(BigInt, primary_key=True)
    request_id: Mapped[str] = mapped_column(String(64), unique=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"))
    project_id: Mapped[str | None] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(128))
    ref: Mapped[str] = mapped_column(String(256))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(index=True)


class Checkpoint(Base):
    """Saved weights. `kind` is weights | sampler_weights; the path is tinker://<run_id>/<kind>/<name>."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("run_id", "kind", "name"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), index=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), index=True)
    kind: Mapped[str] = mapped_column(String(32))
    name: Mapped[str] = mapped_column(String(256))
    ref: Mapped[str] = mapped_column(String(256), index=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    public: Mapped[bool]
    user_metadata: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None] = mapped_column(index=True)


#: Operations that may begin a run from weights or load weights; and samples. Written as in an index; otherwise SQLite
#: does not see that the index has all columns.
LOADS = text("operations.kind IN ('create', 'load_state')")
_LOADS = text("kind IN ('create', 'load_state')")
SAMPLES = text("operations.kind = 'sample'")
_SAMPLES = text("kind = 'sample' AND finished_at IS NOT NULL")


class Operation(Base):
    """The journal. (lane, seq) names an operation for its client: a lane is a run id (strictly ordered) or a sampler
    id (unordered). `state` is queued | done | failed. What a client sent and is answered lies in `body` and
    `result` where it is small (`scheduler.journal.rows`; a `result` that is not JSON in base64), else in the blobs
    `body_ref` and `result_ref`."""

    __tablename__ = "operations"
    __table_args__ = (
        UniqueConstraint("lane", "seq"),
        Index("ix_operations_state_lane", "state", "lane"),
        # All that `scheduler.journal.ending.results` asks of the results that are still kept, without a look at their
        # rows.
        Index(
            "ix_operations_kept",
            *("org_id", "fetched_at", "finished_at", "result_bytes"),
            sqlite_where=text("result_bytes IS NOT NULL"),
            postgresql_where=text("result_bytes IS NOT NULL"),
        ),
        # A run has few of them, among all its steps.
        Index("ix_operations_loads", "lane", sqlite_where=_LOADS, postgresql_where=_LOADS),
        # The oldest are deleted; all other operations stay.
        Index("ix_operations_samples", "finished_at", sqlite_where=_SAMPLES, postgresql_where=_SAMPLES),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    org_id: Mapped[str] = mapped_column(ForeignKey("organisations.id"), index=True)
    session_id: Mapped[str] = mapped_column(String(64), index=True)
    key_id: Mapped[int | None] = mapped_column(BigInteger)  # who asked, and the session's project at that time
    user_id: Mapped[str | None] = mapped_column(String(64))
    project_id: Mapped[str | None] = mapped_column(String(64))
    lane: Mapped[str] = mapped_column(String(128))
    seq: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(String(32))
    base_model: Mapped[str] = mapped_column(String(256))
    state: Mapped[str] = mapped_column(String(16))
    tokens: Mapped[int] = mapped_column(BigInteger)  # the tokens that it counts as in the queue
    hold_nusd: Mapped[int] = mapped_column(BigInteger, server_default="0")  # the most it can cost; held while queued
    # for a save: about how many bytes it will store
    stores_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    body: Mapped[str | None] = mapped_column(Text)
    body_ref: Mapped[str] = mapped_column(String(256))
    body_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")  # its length
    body_sha256: Mapped[str] = mapped_column(String(64))  # as hex; "" without a body
    sent_sha256: Mapped[str | None] = mapped_column(String(64))  # of what the client sent, where that is not the body
    plan: Mapped[dict[str, Any]]  # what is needed to queue it again: scheduler.order.plans
    origin: Mapped[str] = mapped_column(String(128), server_default="")  # store.tracing.origin_here
    result: Mapped[str | None] = mapped_column(Text)
    result_ref: Mapped[str | None] = mapped_column(String(256))
    result_type: Mapped[str | None] = mapped_column(String(64))
    result_bytes: Mapped[int | None] = mapped_column(BigInteger)  # None: there is no result, or it is no longer kept
    fetched_at: Mapped[datetime | None]  # when its client first had the result
    error: Mapped[str | None] = mapped_column(String(4096))
    error_category: Mapped[str | None] = mapped_column(String(16))
    accepted_at: Mapped[datetime]
    finished_at: Mapped[datetime | None] = mapped_column(index=True)
    timings: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # scheduler.order.timings
    attempts: Mapped[int] = mapped_column(server_default="0")  # trainers lost over it since it last got further
    policy: Mapped[dict[str, Any] | None] = mapped_column(
        JSON(none_as_null=True)
    )  # scheduler.journal.samples.versions.row_of
