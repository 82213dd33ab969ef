"""Protobuf messages from bytes."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from weft.wire.error import WireError

M = TypeVar("M", bound=Message)


def read_message(body: bytes, form: type[M]) -> M:
    """`body` as a message of that form; `WireError` if it is none."""
    message = form()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise WireError(f"not a {message.DESCRIPTOR.name}: {error}") from None
    return message
