"""From a request to an OpenAI- or vLLM-compatible route to what is accepted: for each of its prompts a sample like any
other. All of them are checked before the first is accepted, and those that were are stopped where a later one is not.

A client that leaves stops its samples and pays for what was drawn. With an `Idempotency-Key` they are finished instead:
the client means to come back, and a retry gets the same operations, computed and billed once.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from sqlalchemy import select
from sqlalchemy.orm import Session
from weft.wire import ModelInput, SampleRequest, SamplingParams
from weft.wire.binary.sample_codec import SampleResult
from weft.wire.turns import Turn

from api.errors import ApiError, Invalid
from api.operations.streaming import Waited
from api.operations.submit import accept
from api.routes.computing.sampling import checked_sample
from api.routes.openai.errors import Refused
from api.routes.openai.models import Target
from api.routes.openai.turns import make_room, record
from api.state.service import ComingTurn, Service
from api.who.principal import Principal
from scheduler.links.messages import sequence_id
from scheduler.order.operations import UNKEPT, NewOperation, Waiting
from store import tables

IDEMPOTENCY, SESSION = "idempotency-key", "x-session-id"
#: Sequence numbers of requests with an idempotency key begin here, those without one at UNKEPT; clients of Tinker's
#: protocol use lower ones.
FIRST_SEQ = 2**62
#: How many prompts one request may have; each is a sample of its own.
MOST_PROMPTS = 128
#: How many log-probabilities one answer may have: each takes some 300 bytes while the answer is written.
MOST_TOLD = 1 << 20
#: How many expert numbers one answer may have; each takes some forty bytes.
MOST_ROUTED = 1 << 24
#: Our names of parameters, and those of OpenAI's and vLLM's APIs.
WORDS = {"num_samples": "n", "topk_prompt_logprobs": "prompt_logprobs"}
#: The pause before a stop is sent again while the sample has not ended.
STOP_AGAIN_S = 1.0


@dataclass(frozen=True)
class Asked:
    """An accepted sample. `keep`: it is finished even if its client leaves."""

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

    @property
    def waited(self) -> Waited:
        restarting = "the server is restarting: send the request again"
        if self.keep:
            restarting = (
                "the server is restarting, and finishes this sample: send the request again with its Idempotency-Key"
            )
        return Waited(self.service, self.who, self.request_id, restarting, unserved=False)

    def leave(self) -> None:
        self.service.afterwards.run(self._stop())

    async def _stop(self) -> None:
        """Stop the sample, since nobody waits for it any more. The turn of what was drawn is recorded all the same."""
        journal, org_id = self.service.journal, self.who.org_id
        while True:
            if not self.keep:
                await journal.cancel(org_id, self.request_id)
            if not isinstance(await journal.outcome(org_id, self.request_id, STOP_AGAIN_S), Waiting):
                break
        try:
            if self.session is not None:
                await self.record(await Waited(self.service, self.who, self.request_id).result())
        finally:
            _free(self.service, [self.turn])

    async def record(self, result: SampleResult) -> None:
        try:
            if self.session is not None and result.sequences:
                turns = self._turns(result)
                await record(self.service, self.who, self.session, self.target, self.request_id, turns)
        finally:
            _free(self.service, [self.turn])

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


async def ask(
    service: Service,
    who: Principal,
    request: Request,
    priority: str,
    target: Target,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_samples: int = 1,
    *,
    told: int = 0,
    likeliest: str = "top_logprobs",
    field: str = "messages",
    **options: Any,
) -> list[Asked]:
    """Accept a request for samples of each prompt, each token of which comes with `told` log-probabilities in the
    answer. `likeliest` is the route's name for the number of likeliest tokens, and `field` its name for prompts. Raises
    Refused for what cannot be had."""
    service.polls.check(who.org_id)
    _check_count(service, target, len(prompts), num_samples)
    model = service.limits.models[target.sampler.base_model]
    most = _room_behind(prompts, model.context_length, params.max_tokens, field)
    read, drawn = sum(map(len, prompts)), num_samples * sum(most)
    of_prompt = 1 + options.get("topk_prompt_logprobs", 0) if options.get("prompt_logprobs") else 0
    choices = (model.mixture_layers or 0) * (model.experts_per_token or 0)
    experts = (num_samples * read + drawn) * choices if options.get("return_routed_experts") else 0
    _check_answer(drawn * told + read * of_prompt, experts, choices, likeliest)
    _check_stops(service, target, params, model.vocab_size)
    words = {**WORDS, "prompt": field, "topk_sample_logprobs": likeliest}
    key, session = request.headers.get(IDEMPOTENCY), request.headers.get(SESSION)
    turns: list[ComingTurn | None] = [None] * len(prompts)
    news = list[tuple[NewOperation, bool]]()
    try:
        for place, prompt in enumerate(prompts):
            with of_prompt_at(place, len(prompts)):
                if session is not None:
                    turns[place] = await make_room(
                        service, who, session, len(prompt), most[place], num_samples, before=place
                    )
                body = SampleRequest(
                    prompt=ModelInput.from_ints(list(prompt)),
                    sampling_params=params,
                    num_samples=num_samples,
                    **options,
                )
                news.append(await _new(service, who, target, priority, key, place, body, words))
        accepting = (_accepted(service, target, *new, place, len(prompts)) for place, new in enumerate(news))
        accepted = await asyncio.gather(*accepting, return_exceptions=True)
    except BaseException:
        _free(service, turns)
        raise
    asked = [
        Asked(service, who, request, target, list(prompt), params, found, session, turn, bool(key))
        for prompt, found, turn in zip(prompts, accepted, turns, strict=True)
        if isinstance(found, str)
    ]
    refused = [found for found in accepted if isinstance(found, BaseException)]
    if refused:
        _free(service, [turn for found, turn in zip(accepted, turns, strict=True) if not isinstance(found, str)])
        for one in asked:
            one.leave()
        raise refused[0]
    return asked


def _free(service: Service, turns: Sequence[ComingTurn | None]) -> None:
    for turn in turns:
        if turn is not None:
            service.turns_coming.discard(turn)


@contextmanager
def of_prompt_at(place: int, prompts: int) -> Iterator[None]:
    """Errors in the block name the prompt, if the request has several."""
    try:
        yield
    except ApiError as error:
        if prompts > 1:
            error.detail = f"prompt[{place}]: {error.detail}"
        raise


def _room_behind(prompts: Sequence[Sequence[int]], longest: int, max_tokens: int | None, field: str) -> list[int]:
    """How many tokens may be drawn after each prompt, at most; the last one takes no position
    (`api.checks.samples.check_sample`). Raises Refused for a prompt that does not fit."""
    most = list[int]()
    for place, prompt in enumerate(prompts):
        with of_prompt_at(place, len(prompts)):
            if len(prompt) > longest:
                raise Refused(
                    f"This model's maximum context length is {longest} tokens, and the prompt has {len(prompt)}: "
                    "shorten it",
                    field,
                    "context_length_exceeded",
                )
        room = longest - len(prompt) + 1
        most.append(room if max_tokens is None else min(max_tokens, room))
    return most


def _check_answer(entries: int, experts: int, choices: int, likeliest: str) -> None:
    """Raise Refused if the answer would have too many log-probabilities, or too many experts (`choices` for each
    token)."""
    if entries > MOST_TOLD:
        raise Refused(
            f"n x max_tokens x (1 + {likeliest}) + prompt x (1 + prompt_logprobs): {entries:,} log-probabilities in "
            f"one answer, the limit is {MOST_TOLD:,}: ask for fewer in each request",
            "max_tokens",
            "too_many_logprobs",
        )
    if experts > MOST_ROUTED:
        raise Refused(
            f"return_routed_experts: {experts:,} experts in one answer (n x (prompt + max_tokens) x {choices} of each "
            f"token), the limit is {MOST_ROUTED:,}: ask for fewer tokens in each request",
            "return_routed_experts",
            "too_many_experts",
        )


def _check_count(service: Service, target: Target, prompts: int, num_samples: int) -> None:
    """Several prompts are as many samples at once. More than may ever be in flight would be told to wait for ever, so
    they are refused."""
    if prompts < 2:
        return
    limits = {"the limit": MOST_PROMPTS, "max_queued_ops_per_org": service.settings.limits.max_queued_ops_per_org}
    limits |= {f"max_in_flight of this {one.scope}": one.max_in_flight for one in target.submitter.limits
               if one.max_in_flight is not None}  # fmt: skip
    which = min(limits, key=lambda name: limits[name])
    if prompts > (most := max(1, limits[which])):
        raise Refused(f"prompt: {prompts} prompts, {which} is {most}: send fewer in each request", "prompt")
    choices = service.limits.max_num_samples
    if choices is not None and prompts * num_samples > choices:
        told = f"prompts x n: {prompts * num_samples} choices in one answer, the limit is {choices}"
        raise Refused(f"{told}: send fewer prompts in each request", "prompt")


def _check_stops(service: Service, target: Target, params: SamplingParams, vocabulary: int) -> None:
    """Check the stops that the client sent; the model's own ends and its template's are added to them. Texts are in
    `stop`, tokens in `stop_token_ids`."""
    own: set[str | int] = {*target.card.eos_token_ids, *target.text.ends}
    own |= {target.text.word(token) for token in target.text.ends}
    sent, most = [stop for stop in params.stop or () if stop not in own], service.limits.max_stop_sequences
    if most is not None and len(sent) > most:
        name = "stop" if isinstance(sent[0], str) else "stop_token_ids"
        raise Refused(f"{name}: {len(sent)} entries, the limit is {most}", name)
    unknown = next((stop for stop in sent if isinstance(stop, int) and stop >= vocabulary), None)
    if unknown is not None:
        says = f"stop_token_ids: token {unknown}; this model's tokens are 0 to {vocabulary - 1}"
        raise Refused(says, "stop_token_ids")


async def _new(
    service: Service,
    who: Principal,
    target: Target,
    priority: str,
    key: str | None,
    place: int,
    body: SampleRequest,
    words: Mapping[str, str],
) -> tuple[NewOperation, bool]:
    """The operation, and whether it repeats one that was accepted with the same key."""
    seq = FIRST_SEQ + _number(who, key, place) if key else UNKEPT + secrets.randbits(61)
    lane = await service.read(lambda reading: _lane(reading, target, seq)) if key else None
    sampler = target.sampler
    if lane is not None and lane != sampler.id:  # an earlier try used weights that were the newest then
        sampler = await service.read(lambda reading: reading.get_one(tables.Sampler, lane))
    try:
        # `_check_stops` has checked the number of stops
        limits = service.limits.model_copy(update={"max_stop_sequences": None})
        check = partial(checked_sample, service, body, sampler, seq, priority, limits)
        new = await service.threads.run(who.org_id, check)
    except Invalid as error:
        raise _in_their_words(error, words) from None
    return new, lane is not None


async def _accepted(service: Service, target: Target, new: NewOperation, repeat: bool, place: int, prompts: int) -> str:
    with of_prompt_at(place, prompts):
        try:
            return await accept(service, target.submitter, new, repeat=repeat)
        except Invalid:
            if not repeat:
                raise
            raise Refused(
                "Idempotency-Key: another request was sent with this key; send that one to have its answer, or this "
                "one with a key of its own",
                IDEMPOTENCY,
                "idempotency_key_reused",
            ) from None


def _in_their_words(error: Invalid, words: Mapping[str, str]) -> Refused:
    """A refusal of the sample, with the name that its parameter has in OpenAI's API."""
    field, colon, what = error.detail.partition(": ")
    name = words.get(field, field.removeprefix("sampling_params."))
    return Refused(f"{name}{colon}{what}", name if colon else None)


def _number(who: Principal, key: str, place: int) -> int:
    if len(key) > 256:
        raise Invalid(f"{IDEMPOTENCY}: {len(key)} characters, the limit is 256")
    of_place = f"\n{place}" if place else ""  # headers contain no line breaks, so keys cannot collide with this
    digest = hashlib.sha256(f"{who.domain} {who.actor} {key}{of_place}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 3


def _lane(session: Session, target: Target, seq: int) -> str | None:
    """The sampler for which a request with that number was accepted before."""
    row = tables.Operation
    return session.scalar(select(row.lane).where(row.seq == seq, row.lane.in_(target.lanes)))
