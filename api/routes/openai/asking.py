"""From a request at a door to its result: one sample, accepted as every other, waited for while its client is there.

A client that leaves stops its sample and pays for what was drawn. With an `Idempotency-Key` it is finished instead: the
client means to come back, and a retry gets the same operation, computed and billed once.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from weft.wire import ModelInput, SampleRequest, SamplingParams
from weft.wire.binary.sample_codec import SampleResult
from weft.wire.turns import Turn

from api.errors import Invalid
from api.http.headers import Large
from api.operations.streaming import drawn, sampled
from api.operations.submit import accept
from api.routes.computing.sampling import checked_sample
from api.routes.openai.errors import Refused
from api.routes.openai.models import Target
from api.routes.openai.text import in_turn
from api.routes.openai.turns import make_room, record
from api.state.coming_turns import ComingTurn
from api.state.service import Service
from api.who.principal import Principal
from scheduler.links.messages import DrawnTokens, sequence_id
from scheduler.order.operations import UNKEPT, Waiting
from store import tables

IDEMPOTENCY, SESSION = "idempotency-key", "x-session-id"
#: Numbers of requests with a key from here, without one from UNKEPT; those of clients of the protocol are below.
FIRST_SEQ = 2**62
#: Log-probabilities in one answer, at most: while it is written, each takes some 300 bytes.
MOST_TOLD = 1 << 20
#: Numbers of experts in one answer, at most; each takes some forty.
MOST_ROUTED = 1 << 24
#: About what an answer takes of each token, log-probability and number of an expert that it tells, once it is written.
TOKEN_BYTES, TOLD_BYTES, ROUTED_BYTES = 8, 64, 4
#: What samples call otherwise.
WORDS = {"num_samples": "n", "topk_prompt_logprobs": "prompt_logprobs"}
#: A stop is told again so often until the sample has ended.
STOP_AGAIN_S = 1.0


@dataclass(frozen=True)
class Asked:
    """An accepted request. `keep`: it is finished although its client leaves. Its answer has `told` log-probabilities
    of each token that is drawn, and `told_of_prompt` of each of the prompt."""

    service: Service
    who: Principal
    request: Request
    target: Target
    prompt: list[int]
    params: SamplingParams
    request_id: str
    session: str | None
    turn: ComingTurn | None
    keep: bool
    told: int = 0
    told_of_prompt: int = 0

    async def result(self) -> SampleResult:
        """The result; raises ClientDisconnect when the client is gone."""
        ending = asyncio.ensure_future(
            sampled(self.service, self.who, self.request_id, self._restarting, unserved=False)
        )
        gone = asyncio.ensure_future(disconnected(self.request))
        try:
            await asyncio.wait((ending, gone), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                raise ClientDisconnect
            result = await ending
        except BaseException:
            self._leave()
            raise
        finally:
            ending.cancel()
            gone.cancel()
        await self._record(result)
        return result

    async def answer(self, write: Callable[[SampleResult], dict[str, Any]]) -> Response:
        """The result in JSON; writing a long one takes seconds, and a few of one organisation are written at a time,
        each when there is room for it beside those that clients are still taking."""
        result, service, org_id = await self.result(), self.service, self.who.org_id
        async with AsyncExitStack() as held:
            held.enter_context(service.polls.counted(org_id))
            await held.enter_async_context(service.large_answers.room(org_id, self._size_of(result)))
            written = await in_turn(org_id, lambda: orjson.dumps(write(result)))
            return Large(written, "application/json", held.pop_all())

    def _size_of(self, result: SampleResult) -> int:
        """About how many bytes its answer will have."""
        drawn = sum(sequence.tokens.size for sequence in result.sequences)
        routed = sum(one.routed_experts.size for one in result.sequences if one.routed_experts is not None)
        told = drawn * self.told + len(self.prompt) * self.told_of_prompt
        return int(drawn * TOKEN_BYTES + told * TOLD_BYTES + routed * ROUTED_BYTES)

    @asynccontextmanager
    async def parts(self) -> AsyncIterator[AsyncIterator[DrawnTokens | SampleResult]]:
        """Its tokens as they are drawn, then its result. Who leaves the block before that has left, though they have
        asked for no part yet: a client may be gone while the first words are written."""
        gone = asyncio.ensure_future(disconnected(self.request))
        how: dict[str, Any] = {"until": gone, "restarting": self._restarting, "unserved": False}
        parts = drawn(self.service, self.who, self.request_id, **how)
        over = False

        async def read() -> AsyncIterator[DrawnTokens | SampleResult]:
            nonlocal over
            async for part in parts:
                if isinstance(part, SampleResult):
                    over = True
                    await self._record(part)
                yield part

        try:
            yield read()
        finally:
            gone.cancel()
            if not over:
                self._leave()
            await parts.aclose()

    @property
    def _restarting(self) -> str:
        if self.keep:
            return "the server is restarting, and finishes this sample: send the request again with its Idempotency-Key"
        return "the server is restarting: send the request again"

    def _leave(self) -> None:
        self.service.afterwards.run(self._stop())

    async def _stop(self) -> None:
        """Nobody waits for it any more. What was drawn is recorded all the same."""
        journal, org_id = self.service.journal, self.who.org_id
        while True:
            if not self.keep:
                await journal.cancel(org_id, self.request_id)
            if not isinstance(await journal.outcome(org_id, self.request_id, STOP_AGAIN_S), Waiting):
                break
        try:
            await self._record(await sampled(self.service, self.who, self.request_id))
        finally:
            self._free()

    async def _record(self, result: SampleResult) -> None:
        try:
            if self.session is not None and result.sequences:
                turns = self._turns(result)
                await record(self.service, self.who, self.session, self.target, self.request_id, turns)
        finally:
            self._free()

    def _free(self) -> None:
        if self.turn is not None:
            self.service.turns_coming.discard(self.turn)

    def _turns(self, result: SampleResult) -> Iterator[Turn]:
        return (
            Turn(
                request_id=self.request_id,
                choice=choice,
                model=self.target.name,
                at=time.time(),
                prompt=self.prompt,
                tokens=sequence.tokens.tolist(),
                logprobs=sequence.logprobs.tolist() if sequence.logprobs is not None else [],
                versions=[(span.version, span.length) for span in sequence.policy],
                stop_reason=sequence.stop_reason,
                temperature=self.params.temperature,
                top_p=self.params.top_p,
                top_k=self.params.top_k,
                sequence_id=sequence_id(self.request_id, choice),
                stale=sequence.stale,
            )
            for choice, sequence in enumerate(result.sequences)
        )


async def disconnected(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def ask(
    service: Service,
    who: Principal,
    request: Request,
    priority: str,
    target: Target,
    prompt: Sequence[int],
    params: SamplingParams,
    num_samples: int = 1,
    *,
    told: int = 0,
    likeliest: str = "top_logprobs",
    **options: Any,
) -> Asked:
    """Accept a request for samples, each token of which comes with `told` log-probabilities in the answer. `likeliest`
    is what its door calls the number of likeliest tokens. Raises Refused for what cannot be had."""
    service.polls.check(who.org_id)
    model = service.limits.models[target.sampler.base_model]
    longest = model.context_length
    if len(prompt) > longest or (len(prompt) == longest and params.max_tokens != 0):
        raise Refused(
            f"This model's maximum context length is {longest} tokens, and the prompt has {len(prompt)}: shorten it",
            "messages",
            "context_length_exceeded",
        )
    most = min(params.max_tokens if params.max_tokens is not None else longest, longest - len(prompt))
    of_prompt = 1 + options.get("topk_prompt_logprobs", 0) if options.get("prompt_logprobs") else 0
    if (entries := num_samples * most * told + len(prompt) * of_prompt) > MOST_TOLD:
        raise Refused(
            f"n x max_tokens x (1 + {likeliest}) + prompt x (1 + prompt_logprobs): {entries:,} log-probabilities in "
            f"one answer, the limit is {MOST_TOLD:,}: ask for fewer in each request",
            "max_tokens",
            "too_many_logprobs",
        )
    choices = (model.mixture_layers or 0) * (model.experts_per_token or 0)
    numbers = num_samples * (len(prompt) + most) * choices
    if options.get("return_routed_experts") and numbers > MOST_ROUTED:
        raise Refused(
            f"return_routed_experts: {numbers:,} experts in one answer (n x (prompt + max_tokens) x {choices} of each "
            f"token), the limit is {MOST_ROUTED:,}: ask for fewer tokens in each request",
            "return_routed_experts",
            "too_many_experts",
        )
    _check_stops(service, target, params)
    session, key = request.headers.get(SESSION), request.headers.get(IDEMPOTENCY)
    turn = None
    if session is not None:
        turn = await make_room(service, who, session, len(prompt), most, num_samples)
    body = SampleRequest(
        prompt=ModelInput.from_ints(list(prompt)), sampling_params=params, num_samples=num_samples, **options
    )
    try:
        request_id = await _accepted(service, who, target, priority, key, body, likeliest)
    except BaseException:
        if turn is not None:
            service.turns_coming.discard(turn)
        raise
    about = (service, who, request, target, list(prompt), params, request_id, session, turn)
    return Asked(*about, keep=bool(key), told=told, told_of_prompt=of_prompt)


def _check_stops(service: Service, target: Target, params: SamplingParams) -> None:
    """The limit is on those that were sent, beside which the ends of the model and of its template stand."""
    own: set[str | int] = {*target.card.eos_token_ids, *target.text.ends}
    own |= {target.text.word(token) for token in target.text.ends}
    sent, most = [stop for stop in params.stop or () if stop not in own], service.limits.max_stop_sequences
    if most is not None and len(sent) > most:
        raise Refused(f"stop: {len(sent)} entries, the limit is {most}", "stop")


async def _accepted(
    service: Service,
    who: Principal,
    target: Target,
    priority: str,
    key: str | None,
    body: SampleRequest,
    likeliest: str,
) -> str:
    seq = FIRST_SEQ + _number(who, key) if key else UNKEPT + secrets.randbits(61)
    lane = await service.read(lambda reading: _lane(reading, target, seq)) if key else None
    sampler = target.sampler
    if lane is not None and lane != sampler.id:  # an earlier try, from weights that were the newest then
        sampler = await service.read(lambda reading: reading.get_one(tables.Sampler, lane))
    try:
        limits = service.limits.model_copy(update={"max_stop_sequences": None})  # `_check_stops` has counted
        new = await run_in_threadpool(checked_sample, service, body, sampler, seq, priority, limits)
    except Invalid as error:
        raise _in_their_words(error, likeliest) from None
    try:
        return await accept(service, target.submitter, new, repeat=lane is not None)
    except Invalid:
        if lane is None:
            raise
        raise Refused(
            "Idempotency-Key: another request was sent with this key; send that one to have its answer, or this one "
            "with a key of its own",
            IDEMPOTENCY,
            "idempotency_key_reused",
        ) from None


def _in_their_words(error: Invalid, likeliest: str) -> Refused:
    """A refusal of the sample, with the name that its parameter has at the doors."""
    field, colon, what = error.detail.partition(": ")
    name = {**WORDS, "topk_sample_logprobs": likeliest}.get(field, field.removeprefix("sampling_params."))
    return Refused(f"{name}{colon}{what}", name if colon else None)


def _number(who: Principal, key: str) -> int:
    if len(key) > 256:
        raise Invalid(f"{IDEMPOTENCY}: {len(key)} characters, the limit is 256")
    digest = hashlib.sha256(f"{who.domain} {who.actor} {key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 3


def _lane(session: Session, target: Target, seq: int) -> str | None:
    """The sampler from which a request of that number was accepted before."""
    row = tables.Operation
    return session.scalar(select(row.lane).where(row.seq == seq, row.lane.in_(target.lanes)))
