"""Reading a sample along: its tokens as they are drawn, then how it ended. The stored result is what counts: whatever a
reader was not told before, it is told from there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import chain, repeat

from starlette.requests import ClientDisconnect
from weft.wire.sample_codec import SampleResult, SequenceResult, decode_sample_response

from api.errors import ApiError, Gone, Invalid, NotFound, Unavailable, quote
from api.state.service import Service
from api.who.principal import Principal
from scheduler.journal.samples.streams import after, cut
from scheduler.links.messages import DrawnTokens
from scheduler.order.operations import Outcome, Waiting

#: The journal is asked again so often.
LOOK_S = 30.0
#: The most tokens that a reader is told at once. Who reads slowly, or asks for a sample that has ended, has all of it
#: coming; others have their turn between two pieces.
TOLD_AT_ONCE = 256


class SampleFailed(ApiError):
    """The operation was accepted and has failed: no retry of the same request helps."""

    status = 500
    code = "sample_failed"


async def ended(service: Service, who: Principal, request_id: str) -> Outcome:
    """How a sample ends, however long it takes. Raises NotFound, Gone, and Unavailable when the server stops first."""
    while True:
        waiting = service.journal.outcome(who.org_id, request_id, LOOK_S)
        found = await service.polls.hold(waiting, None)
        if found is None:
            stopping = "the server is restarting: the operation is kept"
            raise (Unavailable(stopping) if service.polls.released else NotFound(f"no request {quote(request_id)}"))
        if isinstance(found, Outcome):
            return found
        if not isinstance(found, Waiting):
            raise Gone(found.why, request_id=request_id)


def result_of(outcome: Outcome, request_id: str) -> SampleResult:
    """What was sampled. Raises Invalid or SampleFailed for an operation that failed."""
    if outcome.error is not None:
        error = Invalid if outcome.category == "user" else SampleFailed
        raise error(outcome.error, request_id=request_id)
    return decode_sample_response(outcome.payload)


async def sampled(service: Service, who: Principal, request_id: str) -> SampleResult:
    return result_of(await ended(service, who, request_id), request_id)


async def drawn(
    service: Service,
    who: Principal,
    request_id: str,
    timeout_s: float | None = None,
    until: asyncio.Future[None] | None = None,
) -> AsyncGenerator[DrawnTokens | SampleResult, None]:
    """The tokens of a sample as they are drawn, each once and in order within its sequence; last its whole result.
    Raises TimeoutError when it has not ended `timeout_s` later, and ClientDisconnect when `until` comes first."""
    loop = asyncio.get_running_loop()
    deadline = None if timeout_s is None else loop.time() + timeout_s
    stream = await service.journal.streams.follow(request_id)
    ending = asyncio.ensure_future(sampled(service, who, request_id))
    told = Counter[int]()
    try:
        while not ending.done():
            more = asyncio.ensure_future(stream.changed.wait())
            for part in stream.beyond(told):
                told[part.sample] += len(part.tokens)
                for piece in pieces_of(part):
                    yield piece
                    await asyncio.sleep(0)
            left = None if deadline is None else max(0.0, deadline - loop.time())
            events = (ending, more) if until is None else (ending, more, until)
            done, _ = await asyncio.wait(events, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
            if until is not None and until.done() and not ending.done():
                raise ClientDisconnect
            if not done:
                raise TimeoutError
        result = await ending
    finally:
        ending.cancel()
    for part in parts_of(result.sequences):
        rest = after(part, told[part.sample])
        for piece in pieces_of(rest) if rest is not None else ():
            yield piece
            await asyncio.sleep(0)
    yield result


def pieces_of(part: DrawnTokens) -> Iterator[DrawnTokens]:
    for start in range(0, len(part.tokens), TOLD_AT_ONCE):
        yield cut(part, start, start + TOLD_AT_ONCE)


def parts_of(sequences: Sequence[SequenceResult]) -> Iterator[DrawnTokens]:
    """Finished sequences in the form of what was drawn."""
    for sample, sequence in enumerate(sequences):
        tokens = sequence.tokens.tolist()
        logprobs = sequence.logprobs.tolist() if sequence.logprobs is not None else []
        versions = list(chain.from_iterable(repeat(span.version, span.length) for span in sequence.policy))
        tops = []
        if sequence.topk is not None:
            tops = [([t for t, _ in row or []], [p for _, p in row or []]) for row in sequence.topk.tolist()]
        yield DrawnTokens(sample, 0, tokens, logprobs, versions or [0] * len(tokens), tops)
