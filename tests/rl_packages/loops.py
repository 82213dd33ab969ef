"""Training loops of the packages, run in their environment against the server of WEFT_BASE_URL. Each loop prints its
steps as one line of JSON."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import verifiers as vf
import weft
from datasets import Dataset
from renderers import DefaultRenderer
from weft import rl
from weft.rl.chat.chat import Policy

from tests.rl_packages.lesson import taught

SMALL = rl.Groups(batch=6, size=6)


def questions() -> Any:
    rng = random.Random(0)
    asked = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(32)]
    return Dataset.from_list([{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in asked])


def exact(completion: Any, answer: str, **_: Any) -> float:
    said = completion[-1]
    content = said["content"] if isinstance(said, dict) else said.content
    return float((content or "").strip() == answer)


def called(completion: Any, **_: Any) -> float:
    """1 if a tool was called, otherwise 0."""
    roles = [each["role"] if isinstance(each, dict) else each.role for each in completion]
    return float("tool" in roles)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Twice(vf.MultiTurnEnv):
    """Asks the same question a second time."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": state["prompt"][0]["content"]}]


class Endless(vf.MultiTurnEnv):
    """Asks for more until the context is full."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": "What is 1 + 2? " * 40}]


class Again(Twice):
    """Asks again if a sample fails, as code written for unreliable servers does."""

    async def get_model_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().get_model_response(*args, **options)
        except vf.Error:
            return await super().get_model_response(*args, **options)


def fail_once_each() -> None:
    """Have the first sample of every prompt fail."""
    draw, seen = Policy.draw, set[tuple[int, ...]]()

    async def draws(policy: Policy, sampler: Any, prompt: list[int], *args: Any, **options: Any) -> Any:
        if tuple(prompt) not in seen:
            seen.add(tuple(prompt))
            raise weft.RequestFailedError("three generators were lost over it", "request", "server")
        return await draw(policy, sampler, prompt, *args, **options)

    setattr(Policy, "draw", draws)  # noqa: B010


def environment(kind: str) -> Any:
    rubric = vf.Rubric(funcs=[exact])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=questions(), rubric=rubric)
    if kind == "endless":
        return Endless(dataset=questions(), rubric=rubric, max_turns=1000)
    if kind == "again":
        fail_once_each()
        return Again(dataset=questions(), rubric=rubric, max_turns=2)
    if kind in ("multi", "spent"):
        return Twice(dataset=questions(), rubric=rubric, max_turns=2)
    return vf.ToolEnv(dataset=questions(), rubric=vf.Rubric(funcs=[exact, called]), tools=[add], max_turns=3)


def loop(service: weft.ServiceClient, kind: str) -> rl.Report:
    run = service.create_lora_training_client("weft/tiny-moe", rank=8, seed=0)
    more: dict[str, Any] = {}
    if kind == "gym":
        env: Any = rl.reasoning_gym("basic_arithmetic", 64, max_tokens=12, min_terms=2, max_terms=2, max_digits=1)
        # Its questions are in words that the model has never seen; a group whose answers are all wrong teaches nothing.
        talks = [[*env.messages(task), {"role": "assistant", "content": task["answer"]}] for task in env.tasks]
        rl.sft(run, rl.conversations(talks, run.get_tokenizer()), batch=8, learning_rate=2e-3, sinks=[])
    elif kind == "renderer":
        env = rl.prompts([{"prompt": "What is 2 + 3?"}], lambda text, task: float("5" in text), max_tokens=6)
        more["renderer"] = DefaultRenderer(run.get_tokenizer())
    else:
        own, most = environment(kind), 8
        if kind == "tool":
            [tool], most = own.tool_defs, 40
            taught(run, {"name": tool.name, "description": tool.description, "parameters": tool.parameters})
        if kind == "spent":
            more["budget_usd"] = 1e-5
        env = rl.verifiers(own, sampling={"max_tokens": most})
    return rl.train(run, env, steps=3, groups=SMALL, learning_rate=1e-3, sinks=[], **more)


if __name__ == "__main__":
    with weft.ServiceClient() as service:
        report = loop(service, sys.argv[1])
        print(report.ended)
        print(json.dumps(report.steps))
