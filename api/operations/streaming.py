"""Reading the tokens of a sample as they are drawn, and then how it ended. The stored result counts: tokens that a
reader missed are taken from it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from starlette.requests import ClientDisconnect
from weft.wire.binary.sample_codec import PolicySpan, SampleResult, SequenceResult, TopkLogprobs, decode_sample_response

from api.errors import STORES, ApiError, Gone, Invalid, NotFound, Unavailable, away, quote
from api.state.service import Service
from api.who.principal import Principal
from scheduler.journal.ending.outcomes import LARGE_BYTES
from scheduler.journal.samples.streams import cut
from scheduler.links.messages import DrawnTokens
from scheduler.order.operations import Outcome, Waiting

#: After this time, and then at this interval, it is checked whether any generator can serve the sample.
FIRST_LOOK_S, LOOK_S = 1.0, 30.0
#: How many tokens a reader is told at once. A slow reader, or one of a sample that has ended, still gets all tokens,
#: but other work has its turn between two pieces.
TOLD_AT_ONCE = 256


class SampleFailed(ApiError):
    """The operation was accepted and has failed: no retry of the same request helps."""

    status = 500
    code = "sample_failed"


class DrawnAnew(ApiError):
    """The tokens told so far are not the beginning of the sample's result."""

    status = 503
    code = "drawn_anew"

    def __init__(self) -> None:
        super().__init__(
            "its generator was lost, and it is drawn anew from newer weights of its run: the tokens that were streamed "
            "are not the beginning of its result; read that, or send the request again"
        )


class Unserved(Unavailable):
    """No generator has the base model or loads it. Raised for clients that cannot be told why they wait: the worker
    that they wait for may never come."""

    code = "no_generator"

    def __init__(self) -> None:
        super().__init__(
            "no generator here has the base model of this request, and none is loading it: send it again later, or "
            "ask the operator for a generator that has it"
        )


#: Told to waiting clients when the server stops.
RESTARTING = "the server is restarting: the operation is kept"


async def whole(service: Service, who: Principal, request_id: str, outcome: Outcome) -> Outcome:
    """The outcome of an operation with its payload. Raises Gone."""
    if not outcome.ref:
        return outcome
    found = await service.threads.run(who.org_id, partial(service.journal.answers.whole, outcome))
    if not isinstance(found, Outcome):
        raise Gone(found.why, request_id=request_id)
    return found


@dataclass(frozen=True)
class Waited:
    """A sample that a request waits for. It is told `restarting` if the server stops first. Unless `unserved` is true,
    Unserved is raised if no generator has had the base model for a while and none loads it
    (`scheduler.order.presence`)."""

    service: Service
    who: Principal
    request_id: str
    restarting: str = RESTARTING
    unserved: bool = True

    async def ended(self) -> Outcome:
        """Wait for the outcome, however long it takes; a large one that is not in memory comes without its payload.
        Raises NotFound, Gone, and Unavailable: if the server stops first, or if database or disk do not answer (a
        stream that has begun could not report such an error otherwise)."""
        service, org_id, request_id = self.service, self.who.org_id, self.request_id
        look_s = FIRST_LOOK_S
        while True:
            waiting, look_s = service.journal.outcome(org_id, request_id, look_s), LOOK_S
            try:
                found = await service.polls.hold(org_id, waiting, None)
            except STORES as error:
                raise away(error) from error
            if found is None:
                stopping = service.polls.released
                raise Unavailable(self.restarting) if stopping else NotFound(f"no request {quote(request_id)}")
            if isinstance(found, Outcome):
                return found
            if isinstance(found, Waiting) and found.unserved and not self.unserved:
                raise Unserved
            if not isinstance(found, Waiting):
                raise Gone(found.why, request_id=request_id)

    async def result(self) -> SampleResult:
        return await self.read(await self.ended())

    async def read(self, outcome: Outcome) -> SampleResult:
        """The result in an outcome. Raises Gone."""
        outcome = await whole(self.service, self.who, self.request_id, outcome)
        if len(outcome.payload) <= LARGE_BYTES:
            return result_of(outcome, self.request_id)
        return await self.service.work(len(outcome.payload), partial(result_of, outcome, self.request_id))

    async def drawn(
        self, timeout_s: float | None = None, until: asyncio.Future[None] | None = None
    ) -> AsyncGenerator[DrawnTokens | SampleResult, None]:
        """The tokens of a sample as they are drawn, each once, and in order within its sequence; at the end its whole
        result. Raises TimeoutError if it has not ended after `timeout_s`, ClientDisconnect if `until` comes first, and
        DrawnAnew if tokens that were told have been replaced by others."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        stream = await self.service.journal.streams.follow(self.request_id)
        ending = asyncio.ensure_future(self.result())
        told, replaced = defaultdict[int, list[int]](list), stream.replaced
        try:
            while not ending.done():
                changed = stream.changed
                if stream.replaced != replaced and told:
                    raise DrawnAnew
                replaced = stream.replaced
                for part in stream.beyond({sample: len(tokens) for sample, tokens in told.items()}):
                    told[part.sample] += part.tokens
                    for piece in pieces_of(part):
                        yield piece
                        await asyncio.sleep(0)
                left = None if deadline is None else max(0.0, deadline - loop.time())
                more = asyncio.ensure_future(changed.wait())
                events = (ending, more) if until is None else (ending, more, until)
                try:
                    done, _ = await asyncio.wait(events, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    more.cancel()
                if until is not None and until.done() and not ending.done():
                    raise ClientDisconnect
                if not done:
                    raise TimeoutError
            result = await ending
        finally:
            ending.cancel()
        # a sample that was stopped may have fewer tokens than were told
        for sample, sequence in enumerate(result.sequences):
            before = told[sample]
            if sequence.tokens[: len(before)].tolist() != before[: sequence.tokens.size]:
                raise DrawnAnew
            for piece in rest_of(sample, sequence, len(before)):
                yield piece
                await asyncio.sleep(0)
        yield result


def result_of(outcome: Outcome, request_id: str) -> SampleResult:
    """The result of a sample. Raises Invalid or SampleFailed if the operation failed."""
    if outcome.error is not None:
        error = Invalid if outcome.category == "user" else SampleFailed
        raise error(outcome.error, request_id=request_id)
    return decode_sample_response(outcome.payload)


def pieces_of(part: DrawnTokens) -> Iterator[DrawnTokens]:
    for start in range(0, len(part.tokens), TOLD_AT_ONCE):
        yield cut(part, start, start + TOLD_AT_ONCE)


def rest_of(sample: int, sequence: SequenceResult, told: int) -> Iterator[DrawnTokens]:
    """The tokens of a finished sequence after its first `told` ones, in pieces: lists of all at once would take
    seconds."""
    top, spans = sequence.topk, sequence.policy or (PolicySpan(0, sequence.tokens.size),)
    versions = np.repeat([span.version for span in spans], [span.length for span in spans])
    for start in range(told, sequence.tokens.size, TOLD_AT_ONCE):
        here = slice(start, start + TOLD_AT_ONCE)
        logprobs = sequence.logprobs[here].tolist() if sequence.logprobs is not None else []
        rows = TopkLogprobs(top.token_ids[here], top.logprobs[here]).tolist() if top is not None else []
        tops = [([token for token, _ in row or []], [logprob for _, logprob in row or []]) for row in rows]
        yield DrawnTokens(sample, start, sequence.tokens[here].tolist(), logprobs, versions[here].tolist(), tops)
