"""What is another organisation's is answered like what exists nowhere, to the byte: nobody learns whether a guess at an
id was right. Made from the table of routes, with the requests of test_cross_tenant.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote

from tests.api.conftest import World
from tests.tenancy.test_cross_tenant import DOORS, ROUTES, Ids, ask, names_something, short, things

#: Headers that belong to one request alone.
HEADERS_OF_ONE = {"content-length", "x-request-id"}


def nowhere(ids: Ids) -> Ids:
    """An id of the same form for each, which exists nowhere."""
    return {name: _unlike(value) if name not in ("kind", "scope") else value for name, value in ids.items()}


def _unlike(id: str) -> str:
    if id.isdecimal():
        return "987654321"
    other = re.sub(r"[0-9a-f]{8}", lambda found: found[0][1:] + ("f" if found[0][0] == "0" else "0"), id)
    return other if other != id else f"{id}-nowhere"


def said(reply: Any, asked: Ids, real: Ids) -> tuple[int, dict[str, str], str]:
    """A reply as it would be for the real ids, without what is each request's own."""
    text = re.sub(r'"request_id":"[0-9a-f]{32}"', "", reply.text)
    for name in sorted(asked, key=lambda name: len(asked[name]), reverse=True):
        for form in (quote, str):
            text = text.replace(form(asked[name]), form(real[name]))
    headers = {name: value for name, value in reply.headers.items() if name not in HEADERS_OF_ONE}
    return reply.status_code, headers, text


def test_anothers_things_are_answered_like_nothing(any_world: World) -> None:
    world, intruder = any_world, any_world.other_key
    ids = things(world)
    other = nowhere(ids)
    assert all(other[name] != ids[name] for name in ids.keys() - {"kind", "scope"})

    def door(path: str, model: str, asked: Ids) -> Any:
        body = DOORS[f"POST {path}"](model.format(**asked))
        return world.http.post(path, headers={"x-api-key": intruder}, json=body)

    asking: dict[str, Callable[[Ids], Any]] = {
        short(route): partial(ask, world, route, key=intruder) for route in ROUTES if names_something(route)
    }
    for name in DOORS:
        for model in ("run:{run_id}", "{path}"):
            asking[f"{name} {model}"] = partial(door, name.split()[1], model)
    said_of = {name: (said(way(ids), ids, ids), said(way(other), other, ids)) for name, way in asking.items()}
    assert {name: both for name, both in said_of.items() if both[0] != both[1]} == {}
