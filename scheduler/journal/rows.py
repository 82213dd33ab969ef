"""Operations as rows of the database, and back. A plan is JSON there, tagged with the name of its struct as "type"."""

from __future__ import annotations

from datetime import datetime
from operator import attrgetter
from typing import Any

import msgspec

from billing.prices import Kind
from scheduler.links.messages import OpKind
from scheduler.order.operations import Operation
from scheduler.order.plans import Plan
from store import tables

#: Tinker counts a forward as prefill: it reads tokens and trains nothing.
TRAIN_KINDS: dict[OpKind, Kind] = {OpKind.FORWARD_BACKWARD: "train", OpKind.FORWARD: "prefill"}

#: A result, or a body of JSON, up to this size lies in its operation's row: a file would cost more than the row.
SMALL_BYTES = 1024

_plan = tables.Operation.plan
#: Fields of plans that queries ask for; NULL where a plan has no such field.
source_ref = _plan["source", "ref"].as_string()
sampler_id = _plan["sampler_id"].as_string()
num_samples = _plan["num_samples"].as_integer()
priority = _plan["priority"].as_string()
sequences = _plan["sequences"]

#: Columns that are fields of an operation, as they are.
_SAME = (
    *("id", "org_id", "session_id", "key_id", "user_id", "project_id", "lane", "seq", "base_model", "tokens"),
    *("stores_bytes", "body_ref", "body_bytes", "body_sha256", "origin", "accepted_at"),
)


def small_text(data: bytes) -> str | None:
    """`data` as any database's text takes it; None for what is too large for a row, not ASCII, or has a NUL (which
    PostgreSQL refuses)."""
    return data.decode() if len(data) <= SMALL_BYTES and data.isascii() and b"\0" not in data else None


def to_row(op: Operation, sent_sha256: str) -> dict[str, Any]:
    """The columns of an operation that has just been accepted; `sent_sha256` is of what its client sent, as hex."""
    return {name: getattr(op, name) for name in _SAME} | {
        "kind": str(op.kind),
        "state": "queued",
        "hold_nusd": 0,
        "body": body_of(op),
        "sent_sha256": sent_sha256 if sent_sha256 != op.body_sha256 else None,
        "plan": msgspec.to_builtins(op.plan),
        "error": None,
        "error_category": None,
        "finished_at": None,
    }


def body_of(op: Operation) -> str | None:
    """The column of a body that lies in its row."""
    return op.body.decode() if op.body else None


class _Packed(msgspec.Struct, array_like=True):
    """A queued operation on its way to another process: what its row says of it."""

    id: str
    org_id: str
    session_id: str
    lane: str
    seq: int
    kind: str
    base_model: str
    tokens: int
    body: bytes
    body_ref: str
    plan: Plan
    accepted_at: datetime
    key_id: int | None
    user_id: str | None
    project_id: str | None
    body_bytes: int
    body_sha256: str
    origin: str


_fields = attrgetter(*_Packed.__struct_fields__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode


def pack(op: Operation, *, body: bool = True) -> bytes:
    """An operation that is queued, and that no worker has had yet; without its body for who only settles it."""
    packed = _Packed(*_fields(op))
    if not body:
        packed.body = b""
    return _encode(packed)


def unpack(packed: bytes) -> Operation:
    """What was packed. Raises ValueError for what another version has packed."""
    op = _decode(packed)
    return Operation(**dict(zip(_Packed.__struct_fields__, _fields(op), strict=True)))


def from_row(row: tables.Operation) -> Operation:
    """An operation that this process has not accepted itself."""
    named = {name: getattr(row, name) for name in (*_Packed.__struct_fields__, "attempts")}
    return Operation(**named | {"body": (row.body or "").encode(), "plan": plan_of(row)})


def plan_of(row: tables.Operation) -> Plan:
    """What an operation is to do."""
    plan: Plan = msgspec.convert(row.plan, Plan)
    return plan


def sent_sha256_of(row: tables.Operation) -> str:
    """SHA-256 of what the client sent, as hex: repeats are known by it."""
    return row.sent_sha256 if row.sent_sha256 is not None else row.body_sha256
