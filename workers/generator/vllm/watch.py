"""Sequences that may end by what their tokens spell: looked at as they come, by the rule that every engine stops by.

vLLM has stop strings of its own, which need its tokenizer and cut by other rules.
"""

from __future__ import annotations

from typing import Any

from workers.generator.stop import StopRule
from workers.generator.vllm.client import VllmClient


async def generate_watched(client: VllmClient, body: dict[str, Any], rule: StopRule) -> dict[str, Any]:
    """As `client.generate`, ended where `rule` stops it. In pieces vLLM tells no prompt logprobs: for them the prompt
    is computed once more."""
    params, scores = dict(body["sampling_params"]), None
    if "prompt_logprobs" in params:
        scored = await client.generate({**body, "sampling_params": {**params, "max_tokens": 1}})
        scores = scored["prompt_logprobs"]
        del params["prompt_logprobs"]
    tokens: list[int] = []
    content: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    versions, stopped = None, False
    async for piece in client.stream({**body, "sampling_params": params}):
        usage = piece.get("usage") or usage
        for choice in piece["choices"]:
            versions = choice.get("weight_versions") or versions
            for entry in (choice["logprobs"] or {}).get("content") or ():
                if not stopped:
                    tokens.append(entry["token_id"])
                    content.append(entry)
                    stopped = rule.check(tokens) == "stop"
            if stopped and choice.get("finish_reason") is None:
                await client.abort([body["request_id"]])
    choice = {"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": versions}
    return {"choices": [choice], "usage": usage, "prompt_logprobs": scores}
