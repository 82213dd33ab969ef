"""Tool calls in what a model has written, in the format that its chat template teaches."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Parsed:
    """`content` is what stands beside the calls."""

    content: str
    calls: tuple[dict[str, Any], ...] = ()


def parse_calls(text: str, template: str) -> Parsed:
    """Qwen's and Hermes' calls (JSON in tags) and Llama's (all is JSON). What cannot be read stays text."""
    if OPEN in template:
        found = [(start, _call(said, "arguments")) for start, said in _tagged(text)]
        if not found or any(call is None for _, call in found):
            return Parsed(text)
        return Parsed(text[: found[0][0]].rstrip("\n"), tuple(call for _, call in found if call is not None))
    if '"parameters"' in template:
        call = _call(text.strip(), "parameters")
        return Parsed("", (call,)) if call is not None else Parsed(text)
    return Parsed(text)


def _tagged(text: str) -> Iterator[tuple[int, str]]:
    """Where each call begins, and what its tags hold. The text is gone through once, whatever a model has written: a
    pattern that may begin and end in many ways would keep the whole server waiting."""
    end = 0
    while (start := text.find(OPEN, end)) >= 0 and (closed := text.find(CLOSE, start + len(OPEN))) >= 0:
        yield start, text[start + len(OPEN) : closed].strip()
        end = closed + len(CLOSE)


def _call(text: str, arguments: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        given = found.get(arguments) or {}
        written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        f"{found['name']}{written}".encode()  # half of a character, as JSON may spell it, is in no answer
    except (ValueError, RecursionError):
        return None
    function = {"name": found["name"], "arguments": written}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
