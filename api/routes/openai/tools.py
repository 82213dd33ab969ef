"""Tools that a model is shown, and its calls of them: in the format that its chat template teaches."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from api.errors import quote
from api.routes.openai.errors import Refused

OPEN, CLOSE = "<tool_call>", "</tool_call>"


#: As the Model Context Protocol has names of tools; OpenAI's are among them.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)


def check_tools(tools: Iterable[Mapping[str, Any]], inner: str = "function") -> None:
    """Raise Refused for what is no function, and for one that cannot be told from another. `inner` is where a tool has
    its name; "" for the tool itself, as in the Responses API."""
    names: set[str] = set()
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if tool.get("type") != "function":
            kind = "no type" if tool.get("type") is None else f"type {quote(tool['type'])}"
            raise _wrong(f"{where}.type", f"{kind}; only functions can be called here, of type 'function'")
        function: Any = tool.get(inner) if inner else tool
        where = f"{where}.{inner}" if inner else where
        if not isinstance(function, Mapping):
            raise _wrong(where, "must be an object with the function's name, and its description and parameters")
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            got = "missing" if name is None else f"{quote(name)} is no name"
            raise _wrong(f"{where}.name", f"{got}; it must be 1 to 128 characters of A-Z a-z 0-9 _ - .")
        if name in names:
            raise _wrong(f"{where}.name", f"{quote(name)} is the name of an earlier tool; each needs its own")
        names.add(name)
        if not isinstance(function.get("description"), str | None):
            raise _wrong(f"{where}.description", "must be text")
        if schema is not None and not (isinstance(schema, Mapping) and schema.get("type", "object") == "object"):
            raise _wrong(f"{where}.parameters", "must be a JSON schema of type 'object', or left out")


def _wrong(where: str, what: str) -> Refused:
    return Refused(f"{where}: {what}", where, "invalid_value")


@dataclass(frozen=True)
class Parsed:
    """`content` is what stands beside the calls."""

    content: str
    calls: tuple[dict[str, Any], ...] = ()


def beginning(template: str) -> tuple[str, bool]:
    """How a call begins in the format of a template, and whether only space may come before; "" for no format."""
    if OPEN in template:
        return OPEN, False
    return ("{", True) if '"parameters"' in template else ("", False)


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
