"""Tool calls in what a model has written, in the format that its chat template teaches."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(OPEN) + r"\s*(.*?)\s*" + re.escape(CLOSE), re.DOTALL)


@dataclass(frozen=True)
class Parsed:
    """`content` is what stands beside the calls."""

    content: str
    calls: tuple[dict[str, Any], ...] = ()


def parse_calls(text: str, template: str) -> Parsed:
    """Qwen's and Hermes' calls (JSON in tags) and Llama's (all is JSON). What cannot be read stays text."""
    if OPEN in template:
        found = [(match, _call(match.group(1), "arguments")) for match in _CALL.finditer(text)]
        if not found or any(call is None for _, call in found):
            return Parsed(text)
        return Parsed(text[: found[0][0].start()].rstrip("\n"), tuple(call for _, call in found if call is not None))
    if '"parameters"' in template:
        call = _call(text.strip(), "parameters")
        return Parsed("", (call,)) if call is not None else Parsed(text)
    return Parsed(text)


def _call(text: str, arguments: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    given = found.get(arguments) or {}
    written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": found["name"], "arguments": written}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
