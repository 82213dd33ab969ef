"""Teaches the built-in model, which has never seen a tool call, to make one: always the same, learned by heart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import weft
from weft import rl


def taught(run: weft.TrainingClient, function: Mapping[str, Any]) -> None:
    """Train the run to call `function`, which adds a and b, whatever is asked."""
    call = {"type": "function", "function": {"name": function["name"], "arguments": {"a": 1, "b": 1}}}
    talks: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for a in range(1, 10)
        for b in range(1, 10)
    ]
    data = rl.conversations(talks, run.get_tokenizer(), tools=[{"type": "function", "function": function}])
    rl.sft(run, data, batch=4, epochs=2, learning_rate=rl.linear(1e-2, 40), sinks=[])


def by_heart(run: weft.TrainingClient, said: Mapping[tuple[int, ...], str]) -> None:
    """Train the run to answer each of these prompts, given as token ids, with its text and the end of the turn."""
    tokenizer, data = run.get_tokenizer(), []
    for prompt, text in said.items():
        ids = [*prompt, *tokenizer.encode(text), tokenizer.eos_token_id]
        weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(ids) - len(prompt))
        data.append(weft.Datum(weft.ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": weights}))
    for _ in range(200):
        backward = run.forward_backward(data, "cross_entropy")
        run.optim_step(weft.AdamParams(learning_rate=2e-3)).result()
        if backward.result().metrics["loss:sum"] < 0.05:
            break
    run.save_weights_and_get_sampling_client()
