"""`verifiers(env)`: an environment of the package verifiers, 0.1.x, sampled by our chats in place of its HTTP client.

verifiers gives the whole conversation at each turn, as messages. A conversation that begins with one that a chat has
held goes on in that chat, so its turns are exact continuations, whatever the messages would be rendered as.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.packages import imported
from weft.rl import checks
from weft.rl.chat.chat import Chat, ContextFullError, Reply
from weft.rl.chat.render import text_of
from weft.rl.envs.environment import Outcome, Reward, own
from weft.rl.signal.advantages import Advantage
from weft.rl.signal.lengths import Size


def verifiers(
    env: Any,
    *,
    sampling: Mapping[str, Any] | None = None,
    expected: Size | None = None,
    advantage: Advantage | None = None,
) -> Verifiers:
    """`env` is what `verifiers.load_environment` returns; of its sampling arguments `sampling` takes `max_tokens`."""
    if others := [name for name in sampling or {} if name != "max_tokens"]:
        raise ValueError(
            f"sampling: {others[0]!r} is said to the loop: rl.train(sampling=SamplingParams(...)); here goes max_tokens"
        )
    if (most := (sampling or {}).get("max_tokens")) is not None:
        checks.count("sampling['max_tokens']", most)
    return Verifiers(env, dict(sampling or {}), expected, advantage)


class Verifiers:
    """The environment's training rows as tasks; rollouts and rewards are its own."""

    def __init__(self, env: Any, sampling: dict[str, Any], expected: Size | None, advantage: Advantage | None) -> None:
        self.env, self.sampling, self.expected, self.advantage = env, sampling, expected, advantage
        says = "rl.verifiers needs 0.1.x: pip install 'verifiers<0.2' (0.4 comes by the door: docs/openai.md)"
        imported("verifiers.clients", says)
        self.tasks: Sequence[Any] = [dict(row) for row in env.get_dataset()]

    async def group(self, task: Any, chats: Sequence[Chat]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._one(task, chat) for chat in chats)))

    async def _one(self, task: Any, chat: Chat) -> Outcome:
        types, client = importlib.import_module("verifiers.types"), _client(chat)
        try:
            [done] = await self.env.run_group(
                [types.RolloutInput(**task)], client, "weft", dict(self.sampling), state_columns=["trajectory"]
            )
        except (Exception, asyncio.CancelledError) as error:
            # verifiers keeps only the text of an error, so a failed sample's own error is taken from the chat
            return own(error)
        if done.get("error") is not None:
            return RuntimeError(f"verifiers: {done['error']}")
        return Reward(float(done["reward"]), {name: float(v) for name, v in (done.get("metrics") or {}).items()})


def _client(chat: Chat) -> Any:
    """A `verifiers.clients.Client` that samples through `chat`; a conversation that it has not seen gets an agent of
    it."""
    clients, errors, types = (importlib.import_module(f"verifiers.{name}") for name in ("clients", "errors", "types"))

    class ChatClient(clients.Client):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self._config = None
            self.held: list[tuple[list[Any], Chat]] = []

        def setup_client(self, config: Any) -> Any:
            return chat

        async def to_native_tool(self, tool: Any) -> Any:
            function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            return {"type": "function", "function": function}

        async def to_native_prompt(self, messages: Any) -> Any:
            return [_message(message) for message in messages], {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            held = [(known, each) for known, each in self.held if prompt[: len(known)] == known]
            known, talk = max(held, key=lambda pair: len(pair[0]), default=([], None))
            if talk is None:
                talk = chat if not self.held else chat.agent(f"conversation-{len(self.held)}")
                talk.tools = list(tools or [])
            self.held = [pair for pair in self.held if pair[1] is not talk]
            try:
                reply = await talk.add(*prompt[len(known) :]).sample(sampling_args.get("max_tokens"))
            except ContextFullError as error:  # verifiers ends the rollout on this error, and scores it
                raise errors.OverlongPromptError from error
            except Exception:  # the chat has read the messages: another try goes on from there
                self.held.append((list(prompt), talk))
                raise
            self.held.append(([*prompt, _said(reply)], talk))
            return reply

        async def raise_from_native_response(self, response: Any) -> None:
            """Does nothing: failed samples raise by themselves."""

        async def from_native_response(self, reply: Reply) -> Any:
            return _response(types, reply)

        async def close(self) -> None:
            """Does nothing: this client keeps nothing open."""

    return ChatClient()


def _said(reply: Reply) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in reply.tool_calls]
    return {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}


def _message(message: Any) -> dict[str, Any]:
    """A message of verifiers as a dict that compares equal when it is the same."""
    content = message.content
    if content is not None and not isinstance(content, str):
        content = [part if isinstance(part, dict) else part.model_dump() for part in content]
    made: dict[str, Any] = {"role": message.role, "content": text_of({"role": message.role, "content": content})}
    calls = getattr(message, "tool_calls", None)
    if calls:
        made["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return made


def _response(types: Any, reply: Reply) -> Any:
    turn = reply.turn
    read, drawn = len(turn.prompt), len(turn.tokens)
    cut = turn.stop_reason == "length"
    finish = "length" if cut else ("tool_calls" if reply.tool_calls else "stop")
    tokens = types.ResponseTokens(
        prompt_ids=list(turn.prompt),
        prompt_mask=[0] * read,
        completion_ids=list(turn.tokens),
        completion_mask=[1] * drawn,
        completion_logprobs=list(turn.logprobs),
    )
    calls = [
        types.ToolCall(id=f"call-{index}", name=call.name, arguments=json.dumps(call.arguments))
        for index, call in enumerate(reply.tool_calls)
    ]
    message = types.ResponseMessage(
        role="assistant",
        content=reply.text,
        finish_reason=finish,
        is_truncated=cut,
        reasoning_content=reply.reasoning,
        tool_calls=calls or None,
        tokens=tokens,
    )
    usage = types.Usage(prompt_tokens=read, completion_tokens=drawn, total_tokens=read + drawn, reasoning_tokens=0)
    return types.Response(id="weft", created=0, model="weft", usage=usage, message=message)
