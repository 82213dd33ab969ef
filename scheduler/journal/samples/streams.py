"""Tokens of streamed samples while they are drawn, for clients that read them as they come. Nothing here is durable:
the operation's result contains all tokens, and it alone counts.

Parts say where they begin, so one that comes twice, or that a second generator draws again after the first has died,
adds nothing. Where the second draws other tokens, for the run's weights have moved meanwhile, they take the place of
those that it replaces.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec

from scheduler.links.messages import Drawn, DrawnTokens

#: How many streams are kept; the one used longest ago is forgotten first.
MAX_STREAMS = 4096


@dataclass(eq=False)
class TokenStream:
    """What one operation has drawn, by sequence. `changed` is set, and replaced, when there is more; `replaced` counts
    how often tokens have given way to others."""

    sequences: dict[int, DrawnTokens] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    replaced: int = 0

    def hear(self, parts: Sequence[DrawnTokens]) -> None:
        for part in parts:
            known = self.sequences.get(part.sample)
            if known is not None and not _agree(known.tokens[part.start :], part.tokens):
                self.replaced += 1
                known = self.sequences[part.sample] = cut(known, 0, part.start)
            more = after(part, len(known.tokens) if known is not None else 0)
            if more is not None and known is None:
                self.sequences[part.sample] = more
            elif more is not None and known is not None:  # appended in place: new lists would be copied for every part
                known.tokens.extend(more.tokens)
                known.logprobs.extend(more.logprobs)
                known.versions.extend(more.versions)
                known.tops.extend(more.tops)
        self.changed.set()
        self.changed = asyncio.Event()

    def beyond(self, told: Mapping[int, int]) -> list[DrawnTokens]:
        """For each sequence the tokens after the first `told[sequence]`, which the reader has."""
        found = (after(sequence, told.get(sample, 0)) for sample, sequence in sorted(self.sequences.items()))
        return [part for part in found if part is not None]


def _agree(known: Sequence[int], told: Sequence[int]) -> bool:
    """Whether the shorter list is a prefix of the longer one."""
    both = min(len(known), len(told))
    return known[:both] == told[:both]


def after(part: DrawnTokens, known: int) -> DrawnTokens | None:
    """The tokens of `part` after the first `known` of its sequence; None if there are none, or if some in between are
    missing."""
    skip = known - part.start
    if not 0 <= skip < len(part.tokens):
        return None
    return cut(part, skip, len(part.tokens))


def cut(part: DrawnTokens, first: int, end: int) -> DrawnTokens:
    """The tokens of `part` numbered `first` up to `end`."""
    return msgspec.structs.replace(
        part,
        start=part.start + first,
        tokens=part.tokens[first:end],
        logprobs=part.logprobs[first:end],
        versions=part.versions[first:end],
        tops=part.tops[first:end],
    )


class TokenStreams(Protocol):
    async def follow(self, op_id: str) -> TokenStream:
        """The stream of an operation that has not ended, with what was drawn of it so far."""


class LocalStreams:
    """Streams from the generators of this process's own desk. A followed stream is never forgotten."""

    def __init__(self) -> None:
        self._streams: OrderedDict[str, TokenStream] = OrderedDict()
        self._followed: WeakValueDictionary[str, TokenStream] = WeakValueDictionary()

    async def follow(self, op_id: str) -> TokenStream:
        return self._stream(op_id)

    def hear(self, drawn: Drawn) -> None:
        self._stream(drawn.op_id).hear(drawn.parts)

    def forget(self, op_id: str) -> None:
        """Drop the stream of an operation that has ended."""
        self._streams.pop(op_id, None)

    def _stream(self, op_id: str) -> TokenStream:
        stream = self._streams.get(op_id) or self._followed.get(op_id) or TokenStream()
        self._streams[op_id] = self._followed[op_id] = stream
        self._streams.move_to_end(op_id)
        if len(self._streams) > MAX_STREAMS:
            self._streams.popitem(last=False)
        return stream
