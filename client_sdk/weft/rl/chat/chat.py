"""`Chat`: a conversation with the policy, in exact tokens. It is the only thing that samples.

A turn's prompt is what was read and sampled before, token for token, and the new messages behind it; so all turns
become one datum (`rollout.join`). Where a template cannot be continued so, the conversation is rendered anew, and a
new datum begins. What was sampled is recorded with its logprobs and policy versions as the server reports them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from weft.errors import APIStatusError, AuthenticationError, BillingError, PermissionDeniedError, WeftError
from weft.rl import checks
from weft.rl.chat.purse import BudgetSpent, Purse
from weft.rl.chat.render import Message, Renderer, Tool, ToolCall
from weft.rl.rollout import Turn
from weft.runs.drawing import SampleFuture
from weft.sampling_client import SamplingClient
from weft.wire.account.limits import ModelLimits
from weft.wire.binary.arrays import Array
from weft.wire.inputs import ModelInput
from weft.wire.sampling import SampledSequence, SampleResponse, SamplingParams

#: Returns True if an answer that begins with these ids should be ended early.
Prune = Callable[[list[int]], bool]


class ContextFullError(ValueError):
    """The conversation leaves no room for another token."""


class StaleError(RuntimeError):
    """The server stopped a sample because its run had moved further on than `max_staleness` allows."""


#: Errors that every further rollout would meet as well, if they come from Weft's server.
FATAL = (BudgetSpent, AuthenticationError, BillingError, PermissionDeniedError)


def is_fatal(error: object) -> bool:
    """True if every further rollout would meet this error as well. A proxy's refusal is not fatal: it may concern the
    words of a single prompt."""
    return isinstance(error, FATAL) and not (isinstance(error, APIStatusError) and error.foreign)


@dataclass
class Policy:
    """The source of rollouts: a sampler, which a loop replaces as it trains, and a renderer, which writes messages as
    tokens."""

    sampler: SamplingClient
    renderer: Renderer
    context: int
    max_staleness: int | None = None
    #: True: turns record the experts that their tokens were sent to, so that training sends the tokens to the same
    #: experts.
    routing_replay: bool = False
    #: Priority of the policy's samples; None is the client's own.
    priority: Literal["interactive", "batch"] | None = None
    purse: Purse = field(default_factory=lambda: Purse({}))
    #: Tokens that end an answer when the caller names none; None leaves that to the server.
    stop: list[int] | None = None
    #: Called after every sample with the number of tokens drawn.
    drawn: Callable[[int], None] = lambda tokens: None

    async def draw(
        self,
        sampler: SamplingClient,
        prompt: list[int],
        n: int,
        params: SamplingParams,
        prune: Prune | None = None,
    ) -> SampleResponse:
        """Draw `n` samples within the budget and the context. `prune` may end a single sample early."""
        room = self.context - len(prompt)
        if room < 1:
            raise ContextFullError(f"the conversation has {len(prompt)} tokens, the model takes {self.context}")
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        params = params.model_copy(update={"max_tokens": most})
        again = len(prompt) * (n - 1)
        held = cost = self.purse.hold(self.purse.price(prefill=len(prompt), cached_prefill=again, sample=most * n))
        try:
            given = ModelInput.from_ints(prompt)
            more: dict[str, Any] = {"max_staleness": self.max_staleness, "priority": self.priority}
            more |= {"return_routed_experts": True} if self.routing_replay else {}
            if prune is None:
                got = await sampler.sample_async(given, n, params, **more)
            else:
                got = await _pruned(sampler.sample(given, n, params, **more, stream=True), prune)
            drawn, hit = sum(len(each.tokens_np) for each in got.sequences), got.prompt_cache_hit_tokens or 0
            cost = self.purse.price(prefill=len(prompt) - hit, cached_prefill=again + hit, sample=drawn)
            self.drawn(drawn)
            return got
        finally:
            self.purse.settle(held, min(cost, held))


def stops_of(renderer: Renderer, model: ModelLimits) -> list[int] | None:
    """The value of `Policy.stop`: the renderer's stop tokens together with the model's own, or None if the model's own
    include them. A base model trained to chat ends its answers as its template does, while its own end token ends a
    text."""
    known = list(getattr(renderer, "get_stop_token_ids", list)())
    if model.eos_token_ids is None or set(known) <= set(model.eos_token_ids):
        return None
    return sorted({*known, *model.eos_token_ids})


async def _pruned(drawing: SampleFuture, prune: Prune) -> SampleResponse:
    """The sample, ended as soon as `prune` returns True of the tokens so far."""
    ids: list[int] = []
    try:
        async for part in drawing:
            ids += part.tokens
            if prune(ids):
                return await drawing.stop_async()
        return await drawing
    except asyncio.CancelledError:
        drawing.cancel()
        raise


@dataclass(frozen=True)
class Reply:
    """An answer of the policy, and the turn in which it was sampled."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    reasoning: str | None
    stop_reason: str
    turn: Turn


class Chat:
    """One conversation of one rollout. `agent` begins another, of the same rollout, that knows nothing of this one."""

    def __init__(
        self,
        policy: Policy,
        seed: str = "",
        *,
        name: str = "",
        params: SamplingParams | None = None,
        tools: Sequence[Tool] = (),
        recorded: list[Turn] | None = None,
        ended: list[Exception] | None = None,
    ) -> None:
        self._policy, self._seed, self.name = policy, seed, name
        self._sampler = policy.sampler
        self.params = params or SamplingParams()
        self.tools = list(tools)
        self.messages: list[Message] = []
        #: Turns of all agents of the rollout, in the order in which they ended.
        self.recorded: list[Turn] = [] if recorded is None else recorded
        #: Errors of samples, of all agents, that no later sample of the same chat made good: code that caught such an
        #: error has no reward to report.
        self.ended: list[Exception] = [] if ended is None else ended
        self._failed: list[Exception] = []  # of these, the errors that this chat's next good sample clears
        self._ids: list[int] = []  # read and sampled so far, to the end of the last turn
        self._new: list[Message] = []
        self._turns = 0
        self._agents: Counter[str] = Counter()

    @property
    def turns(self) -> int:
        """Samples of this conversation."""
        return self._turns

    def agent(self, name: str, tools: Sequence[Tool] = ()) -> Chat:
        """Another conversation of this rollout, with the same reward. Agents of the same name get different random
        numbers."""
        namesakes = self._agents[name]
        self._agents[name] += 1
        return Chat(
            self._policy,
            f"{self._seed}/{name}" + (f"/{namesakes}" if namesakes else ""),
            name=name,
            params=self.params,
            tools=tools,
            recorded=self.recorded,
            ended=self.ended,
        )

    def add(self, *messages: Message) -> Chat:
        """Messages that the policy reads next."""
        self.messages += messages
        self._new += messages
        return self

    def system(self, text: str) -> Chat:
        return self.add({"role": "system", "content": text})

    def user(self, text: str) -> Chat:
        return self.add({"role": "user", "content": text})

    def tool(self, call: ToolCall, result: Any) -> Chat:
        """Add a tool's answer to the conversation."""
        return self.add({"role": "tool", "name": call.name, "content": str(result)})

    def rewrite(self, messages: Sequence[Message]) -> Chat:
        """Replace this conversation's history: the next turn begins a new datum."""
        self.messages, self._new, self._ids = list(messages), list(messages), []
        return self

    def prompt(self) -> list[int]:
        """The ids that the next sample continues."""
        tools = self.tools or None
        if self._ids:
            bridged = self._policy.renderer.bridge_to_next_turn(self._read, self._drawn, list(self._new), tools=tools)
            ids = getattr(bridged, "token_ids", bridged)
            if ids is not None:
                return list(ids)
        return self._policy.renderer.render_ids(list(self.messages), tools=tools, add_generation_prompt=True)

    async def sample(self, max_tokens: int | None = None, stop: Any = None, prune: Prune | None = None) -> Reply:
        """The policy's next answer, to what was added since the last. `prune` looks at the ids while they are drawn,
        and ends the answer by saying True: what was drawn by then is paid for, and is the answer."""
        params, prompt = self._for_next(max_tokens, stop), self.prompt()
        try:
            got = await self._policy.draw(self._sampler, prompt, 1, params, prune)
            reply = self._take(prompt, got.sequences[0])
        except (WeftError, StaleError) as error:
            self.ended.append(error)
            if not is_fatal(error) and not isinstance(error, StaleError):
                self._failed.append(error)
            raise
        for made_good in self._failed:
            self.ended.remove(made_good)
        self._failed = []
        return reply

    def _for_next(self, max_tokens: int | None, stop: Any) -> SamplingParams:
        if not self._new:
            raise ValueError("nothing was added since the last sample: chat.user(...) or chat.tool(...) first")
        if max_tokens is not None:
            checks.count("max_tokens", max_tokens)
        seed = random.Random(f"{self._seed}#{self._turns}").getrandbits(40)
        if stop is None and self.params.stop is None:
            stop = self._policy.stop
        update = {"max_tokens": max_tokens, "stop": stop}
        given = {name: value for name, value in update.items() if value is not None}
        return self.params.model_copy(update={"seed": seed, **given})

    def _take(self, prompt: list[int], sequence: SampledSequence) -> Reply:
        if sequence.logprobs is None:
            raise ValueError("the server returned no logprobs of what it sampled")
        turn = Turn(
            tuple(prompt),
            tuple(sequence.tokens),
            tuple(sequence.logprobs),
            tuple(sequence.policy_versions),
            sequence.stop_reason,
            sequence.stale,
            self.name,
            self.params.temperature,
            self.params.top_p,
            self.params.top_k,
            sequence.sequence_id,
            _routes(sequence) if self._policy.routing_replay else None,
        )
        self.recorded.append(turn)
        if sequence.stale:
            raise StaleError(f"stopped after {len(turn.tokens)} tokens: the run has moved on too far")
        self._read, self._drawn, self._ids = prompt, list(turn.tokens), prompt + list(turn.tokens)
        self._turns, self._new = self._turns + 1, []
        parsed = self._policy.renderer.parse_response(self._drawn, tools=self.tools or None)
        calls = tuple(_call(call) for call in parsed.tool_calls or ())
        said: dict[str, Any] = {"role": "assistant", "content": parsed.content or ""}
        if parsed.reasoning_content:  # which some templates show to the end of a turn's calls
            said["reasoning_content"] = parsed.reasoning_content
        if calls:
            said["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        self.messages.append(said)
        return Reply(parsed.content or "", calls, parsed.reasoning_content, turn.stop_reason, turn)


def _routes(sequence: SampledSequence) -> Array:
    """The experts of the answer's tokens, stored in two bytes each."""
    if sequence.routed_experts_np is None:
        raise ValueError("the server returned no experts of what it sampled")
    return sequence.routed_experts_np.astype(np.uint16)


def _call(call: Any) -> ToolCall:
    """A tool call, as `ToolCall`, from any kind of renderer."""
    return call if isinstance(call, ToolCall) else ToolCall(call.name or "", call.arguments)


async def answers_together(chats: Sequence[Chat], max_tokens: int | None, stop: Any) -> list[Reply | BaseException]:
    """One answer for each of several chats. Chats that have read the same tokens share one request, whose prompt is
    computed once. An error of one chat (a stale answer) leaves the others' answers alone."""
    first = chats[0]
    prompt = first.prompt()
    if any(chat.prompt() != prompt for chat in chats[1:]):
        return await asyncio.gather(*(chat.sample(max_tokens, stop) for chat in chats), return_exceptions=True)
    got = await first._policy.draw(first._sampler, prompt, len(chats), first._for_next(max_tokens, stop))
    answers = list[Reply | BaseException]()
    for chat, sequence in zip(chats, got.sequences, strict=True):
        try:
            answers.append(chat._take(prompt, sequence))
        except StaleError as error:
            answers.append(error)
    return answers
