"""Turns of conversations that were sampled under a client's own session id (`X-Session-ID`)."""

from __future__ import annotations

from weft.wire.base import Response

__all__ = ["Turn", "TurnsResponse"]


class Turn(Response):
    """One sampled answer: `tokens` behind `prompt`, the logprob of each, which policy version drew how many (version,
    count), and how. `stale`: it was ended because its run had moved on too far (`max_staleness`). `choice`
    is its number in a request for several; `at` is in seconds since 1970."""

    request_id: str
    choice: int
    model: str
    at: float
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    stop_reason: str
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    sequence_id: str = ""
    stale: bool = False


class TurnsResponse(Response):
    """Turns in their order. With `next`, there are more: ask again with `after` of that value."""

    session: str
    turns: list[Turn]
    next: int | None = None
