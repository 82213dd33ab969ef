"""A call of a tool, which the built-in model has never seen: always the same, learned by heart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import weft
from weft import rl


def taught(run: weft.TrainingClient, function: Mapping[str, Any]) -> None:
    """To call `function`, which adds a and b, whatever is asked."""
    call = {"type": "function", "function": {"name": function["name"], "arguments": {"a": 1, "b": 1}}}
    talks: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for a in range(1, 10)
        for b in range(1, 10)
    ]
    data = rl.conversations(talks, run.get_tokenizer(), tools=[{"type": "function", "function": function}])
    rl.sft(run, data, batch=4, epochs=2, learning_rate=rl.linear(1e-2, 40), sinks=[])
