"""Tools that are shown to a model, and the model's calls of them, in the format of its chat template."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from api.errors import quote
from api.routes.openai.errors import Refused

OPEN, CLOSE = "<tool_call>", "</tool_call>"


#: Names of tools as in the Model Context Protocol, which include OpenAI's.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)


def check_tools(tools: Iterable[Mapping[str, Any]], inner: str = "function") -> None:
    """Raise Refused for a tool that is no function, and for two of the same name. `inner` is the field that holds a
    tool's name; "" for the tool itself, as in the Responses API."""
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
    """A text's tool calls; `content` is the rest."""

    content: str
    calls: tuple[dict[str, Any], ...] = ()


def beginning(template: str) -> tuple[str, bool]:
    """The text with which a call begins in a template's format ("" if it has none), and whether only space may come
    before that text."""
    if OPEN in template:
        return OPEN, False
    return ("{", True) if '"parameters"' in template else ("", False)


def parse_calls(text: str, template: str) -> Parsed:
    """Reads the calls of Qwen and Hermes (JSON in tags) and of Llama (the whole text is JSON). A call that cannot be
    read stays text."""
    if OPEN in template:
        beside, said = _tagged(text)
        calls = [_call(each, "arguments") for each in said]
        if not calls or any(call is None for call in calls):
            return Parsed(text)
        return Parsed("".join(beside), tuple(call for call in calls if call is not None))
    if '"parameters"' in template:
        call = _call(text.strip(), "parameters")
        return Parsed("", (call,)) if call is not None else Parsed(text)
    return Parsed(text)


def _tagged(text: str) -> tuple[list[str], list[str]]:
    """The text outside of call tags, and the contents of the tags; an unclosed tag has none. The line break before the
    first tag, which the template writes, belongs to neither. The text is read once, whatever a model wrote: a pattern
    that can match in many ways would hold up the whole server."""
    beside, held, end = list[str](), list[str](), 0
    while (start := text.find(OPEN, end)) >= 0:
        closed = text.find(CLOSE, start + len(OPEN))
        if closed < 0:
            held.append("")
            break
        beside.append(text[end:start])
        held.append(text[start + len(OPEN) : closed].strip())
        end = closed + len(CLOSE)
    first, *others = [*beside, text[end:]]
    return [first.removesuffix("\n"), *(each.rstrip("\n") for each in others)], held


def _call(text: str, arguments: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        given = found.get(arguments) or {}
        written = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, allow_nan=False)
        # fails for half of a surrogate pair, which JSON may spell but no answer may contain
        f"{found['name']}{written}".encode()
    except (ValueError, RecursionError):
        return None
    function = {"name": found["name"], "arguments": written}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
