"""Unmodified agent frameworks against the server of WEFT_BASE_URL: `python frameworks.py FRAMEWORK MODEL SESSION`.
Each has a tool and asks one question: the model calls the tool, reads its result, and answers; instructor has a type
instead of the tool. None knows anything of Weft; what they send is kept under SESSION. Prints one line of JSON: the
arguments of the tool's calls, and the answer, or the error that ended it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

QUESTION = "What is 3 + 4?"
CALLED: list[tuple[int, int]] = []


def endpoint(session: str) -> dict[str, Any]:
    """The arguments for a client of `openai`."""
    url, key = f"{os.environ['WEFT_BASE_URL']}/v1", os.environ["WEFT_API_KEY"]
    return {"base_url": url, "api_key": key, "default_headers": {"X-Session-ID": session}}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    CALLED.append((a, b))
    return a + b


def openai_agents(model: str, session: str) -> str:
    """Over chat completions."""
    return _openai_agents(model, session, "OpenAIChatCompletionsModel")


def openai_agents_responses(model: str, session: str) -> str:
    """Over the Responses API, its default, streamed."""
    return _openai_agents(model, session, "OpenAIResponsesModel", streamed=True)


def _openai_agents(model: str, session: str, kind: str, streamed: bool = False) -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    served = getattr(agents, kind)(model=model, openai_client=AsyncOpenAI(**endpoint(session)))
    agent = agents.Agent(name="adder", model=served, tools=[agents.function_tool(add)])

    async def go() -> str:
        if not streamed:
            return str((await agents.Runner.run(agent, QUESTION, max_turns=3)).final_output)
        running = agents.Runner.run_streamed(agent, QUESTION, max_turns=3)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    return asyncio.run(go())


def pydantic_ai(model: str, session: str) -> str:
    return _pydantic_ai(model, session, "OpenAIChatModel")


def pydantic_ai_responses(model: str, session: str) -> str:
    return _pydantic_ai(model, session, "OpenAIResponsesModel")


def _pydantic_ai(model: str, session: str, kind: str) -> str:
    from openai import AsyncOpenAI
    from pydantic_ai import Agent
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=AsyncOpenAI(**endpoint(session)))
    return str(Agent(getattr(openai, kind)(model, provider=provider), tools=[add]).run_sync(QUESTION).output)


def langgraph(model: str, session: str) -> str:
    """langchain-openai's chat model in langgraph's agent, streamed."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    chat = ChatOpenAI(model=model, streaming=True, **endpoint(session))
    done = create_react_agent(chat, [add]).invoke({"messages": [("user", QUESTION)]})
    return str(done["messages"][-1].content)


def litellm(model: str, session: str) -> str:
    """Two completions by hand, the second streamed."""
    import litellm

    given = endpoint(session)
    given |= {"model": f"openai/{model}", "extra_headers": given.pop("default_headers")}
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
    shown = {"name": "add", "description": "Add two numbers.", "parameters": schema}
    given["tools"] = [{"type": "function", "function": shown}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    said = litellm.completion(messages=messages, **given).choices[0].message
    messages.append(said)
    for call in said.tool_calls or ():
        result = add(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    parts = litellm.completion(messages=messages, stream=True, **given)
    return "".join(part.choices[0].delta.content or "" for part in parts)


def instructor(model: str, session: str) -> str:
    """A typed answer that the prompt asks for: the server refuses a JSON schema, and a tool that must be called."""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Sum(BaseModel):
        a: int
        b: int

    client = instructor.from_openai(OpenAI(**endpoint(session)), mode=instructor.Mode.MD_JSON)
    messages = [{"role": "user", "content": QUESTION}]
    found = client.chat.completions.create(model=model, messages=messages, response_model=Sum, max_retries=0)
    return str(add(found.a, found.b))


FRAMEWORKS: dict[str, Callable[[str, str], str]] = {
    each.__name__: each
    for each in (
        *(openai_agents, openai_agents_responses, pydantic_ai, pydantic_ai_responses, langgraph),
        *(litellm, instructor),
    )
}


if __name__ == "__main__":
    _, framework, model, session = sys.argv
    said = {"answer": "", "error": ""}
    try:
        said["answer"] = FRAMEWORKS[framework](model, session)
    except Exception as error:  # a model that has not learned yet makes calls that nobody can read
        said["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps({"called": CALLED, **said}))
