"""How many things a body is made of, found before anything is built from it.

Few bytes can ask for many objects: `[` and `]` are a list in Python, two bytes of protobuf a message. Objects cost
memory, and while they are built the interpreter does nothing else, so what a body may hold follows from what building
it may cost: below 0.2 s, and some tens of megabytes.

JSON is counted by its punctuation, which is at least what it holds: what is inside of strings counts too. Protobuf is
walked along its schema, without building it.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from api.errors import Invalid, TooLarge

#: Smaller bodies cannot hold enough to matter.
HARMLESS_BYTES = 65_536

MAX_CONTAINERS = 65_536  # lists and objects of JSON
MAX_MEMBERS = 65_536  # names in its objects
MAX_VALUES = 2_000_000  # elements of its lists
MAX_FIELDS = 262_144  # fields of a protobuf message and all messages in it
MAX_FIELDS_OF_ONE = 32_768  # fields of a single message: checked first, since it is found sooner
#: Bytes of packed numbers in one protobuf field: only shapes are packed, arrays are bytes.
MAX_PACKED_BYTES = 1024

#: How many bytes are counted at a time, so that other threads get their turn.
_PIECE = 1 << 20

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTH = {_FIXED64: 8, _FIXED32: 4}


def check_json(body: bytes, most_values: int = MAX_VALUES) -> None:
    """Raise TooLarge for JSON with more objects than may be built."""
    if len(body) <= HARMLESS_BYTES:
        return
    containers = members = values = 0
    for start in range(0, len(body), _PIECE):
        end = start + _PIECE
        containers += body.count(b"{", start, end) + body.count(b"[", start, end)
        members += body.count(b":", start, end)
        values += body.count(b",", start, end)
        for count, most, what in (
            (containers, MAX_CONTAINERS, "lists and objects"),
            (members, MAX_MEMBERS, "names of members"),
            (values, most_values, "values"),
        ):
            if count > most:
                raise _too_many(f"{what} of JSON", most)


def check_protobuf(body: bytes, form: type[Message]) -> None:
    """Raise TooLarge for protobuf with more objects than may be built, and Invalid for bytes that are no protobuf."""
    if len(body) > HARMLESS_BYTES:
        try:
            _walk(body, form.DESCRIPTOR)
        except IndexError:
            raise Invalid(f"the body is not a {form.DESCRIPTOR.name}: it breaks off") from None


def begins_with(body: bytes, *fields: int) -> list[bytes | int] | None:
    """The values of the first fields (bytes and varints) of a protobuf message whose end may be missing. None if it
    begins with other fields; libraries write fields in the order of their numbers."""
    found, at = list[bytes | int](), 0
    try:
        for number in fields:
            key, at = _varint(body, at)
            value, at = _varint(body, at)
            if key == number << 3 | _BYTES:
                found.append(body[at : at + value])
                at += value
            elif key == number << 3 | _VARINT:
                found.append(value)
            else:
                return None
    except (IndexError, Invalid):
        return None
    return found


def _walk(body: bytes, root: Any) -> None:
    """Walk over all fields of `root` and of the messages in it, those of the upper levels first."""
    known = _messages(root)
    waiting: list[tuple[int, int, Any]] = [(0, len(body), root)]
    fields = 0
    while waiting:
        at, end, message = waiting.pop()
        inner = known[message.full_name]
        most = min(MAX_FIELDS, fields + MAX_FIELDS_OF_ONE)
        while at < end:
            fields += 1
            if fields > most:
                if most == MAX_FIELDS:
                    raise _too_many("fields of protobuf", MAX_FIELDS)
                raise _too_many(f"fields of protobuf in one {message.name}", MAX_FIELDS_OF_ONE)
            key, at = _varint(body, at)
            kind = key & 7
            if kind == _BYTES:
                size, at = _varint(body, at)
                field = inner.get(key >> 3)
                if at + size > end:
                    raise Invalid(f"the body is not a {root.name}: a field of {message.name} is longer than it")
                if isinstance(field, Descriptor):
                    waiting.append((at, at + size, field))
                elif field is not None and size > MAX_PACKED_BYTES:
                    raise _too_many(f"bytes of packed numbers in a field of {message.name}", MAX_PACKED_BYTES)
                at += size
            elif kind == _VARINT:
                _, at = _varint(body, at)
            elif kind in _WIDTH:
                at += _WIDTH[kind]
            else:
                raise Invalid(f"the body is not a {root.name}: it has a field of the wire type {kind}")


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """The varint at `at`, and the position after it. IndexError if the body ends before."""
    byte = body[at]
    at += 1
    if byte < 0x80:
        return byte, at
    value, shift = byte & 0x7F, 7
    while byte >= 0x80:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise Invalid("the body is not protobuf: it has a number of more than ten bytes")
    return value, at


def _messages(root: Any) -> dict[str, dict[int, Any]]:
    """For every message type in `root`: the fields to look into, by number: messages, and numbers that may be
    packed."""
    found: dict[str, dict[int, Any]] = {}
    waiting = [root]
    while waiting:
        message = waiting.pop()
        if message.full_name in found:
            continue
        fields = found[message.full_name] = {}
        for field in message.fields:
            if field.message_type is not None:
                fields[field.number] = field.message_type
                waiting.append(field.message_type)
            elif field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
                fields[field.number] = field
    return found


def _too_many(what: str, most: int) -> TooLarge:
    return TooLarge(f"the body has more than {most} {what}: send fewer data in one request")
