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

#: A result or a JSON body up to this size lies in its operation's row: a file would cost more than the row.
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
    """`data` as text that any database takes. None if it is too large for a row, not ASCII, or contains NUL (which
    PostgreSQL refuses)."""
    return data.decode() if len(data) <= SMALL_BYTES and data.isascii() and b"\0" not in data else None


def to_row(op: Operation, sent_sha256: str) -> dict[str, Any]:
    """The columns of a newly accepted operation; `sent_sha256` is the digest, as hex, of what its client sent."""
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
    """The `body` column of an operation whose body lies in its row."""
    return op.body.decode() if op.body else None


class _Packed(msgspec.Struct, array_like=True):
    """A queued operation on its way to another process: the columns of its row."""

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
    """Pack a queued operation that no worker has had yet; without its body if the receiver only settles it."""
    packed = _Packed(*_fields(op))
    if not body:
        packed.body = b""
    return _encode(packed)


def unpack(packed: bytes) -> Operation:
    """Unpack an operation. Raises ValueError if another version packed it."""
    op = _decode(packed)
    return Operation(**dict(zip(_Packed.__struct_fields__, _fields(op), strict=True)))


def from_row(row: tables.Operation) -> Operation:
    """An operation from its row, accepted by another process."""
    named = {name: getattr(row, name) for name in (*_Packed.__struct_fields__, "attempts")}
    return Operation(**named | {"body": (row.body or "").encode(), "plan": plan_of(row)})


def plan_of(row: tables.Operation) -> Plan:
    """The plan of an operation, from its row."""
    plan: Plan = msgspec.convert(row.plan, Plan)
    return plan


def sent_sha256_of(row: tables.Operation) -> str:
    """SHA-256, as hex, of what the client sent: repeats are recognised by it."""
    return row.sent_sha256 if row.sent_sha256 is not None else row.body_sha256
