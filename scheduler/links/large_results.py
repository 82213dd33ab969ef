"""A worker's answer on its way through Redis: large results travel as blobs, and the message names them."""

from __future__ import annotations

import secrets
from typing import TypeGuard

import msgspec

from scheduler.links.contract import QueueUnreachable
from scheduler.links.messages import Done, FromGenerator, FromTrainer
from store.blobs.contract import Blobs

#: A larger result is put beside the message.
INLINE_BYTES = 1 << 16

_encode = msgspec.msgpack.Encoder().encode


class LargeResult(msgspec.Struct, frozen=True):
    message: FromTrainer | FromGenerator
    payload_ref: str = ""


#: A packed parcel before its payload is written to a blob.
parcel_of = msgspec.msgpack.Decoder(LargeResult).decode


def is_large(message: FromTrainer | FromGenerator) -> TypeGuard[Done]:
    """True if the message's payload is so large that it is sent through a blob."""
    return isinstance(message, Done) and len(message.payload) > INLINE_BYTES


def pack(message: FromTrainer | FromGenerator, blobs: Blobs) -> bytes:
    """Pack a message. Raises QueueUnreachable if the shared store takes nothing for now."""
    if not is_large(message):
        return _encode(LargeResult(message))
    ref = f"handoff/{message.op_id}.{secrets.token_hex(4)}"
    try:
        blobs.put(ref, message.payload)
    except OSError as error:
        raise QueueUnreachable(f"the result of {message.op_id} cannot be handed over: {error}") from error
    return _encode(LargeResult(msgspec.structs.replace(message, payload=b""), ref))


def whole(parcel: LargeResult, blobs: Blobs) -> tuple[FromTrainer | FromGenerator, str]:
    """The message with its payload, and the blob to delete once it is dealt with ("" for none)."""
    if not parcel.payload_ref or not isinstance(parcel.message, Done):
        return parcel.message, ""
    payload = blobs.get(parcel.payload_ref)
    return msgspec.structs.replace(parcel.message, payload=payload), parcel.payload_ref
