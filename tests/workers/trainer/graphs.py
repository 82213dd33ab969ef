"""Uploaded losses as their graphs are stored."""

from __future__ import annotations

import json
from typing import Any

from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph
from weft.wire.checks.custom_format import CustomLoss, decode_custom_loss, encode_custom_loss, parse_custom_loss

RANKS_OF_PLACES = {"logprobs": 1, "places": 1}


def stored(handle: LossHandle) -> CustomLoss:
    """The loss after it was sent as the request's JSON, which drops nulls, and stored as a blob."""
    graph = json.loads(encode_graph(handle).model_dump_json(exclude_none=True))
    pairs = [(item.name, item.rank) for item in handle.inputs]
    parse_custom_loss(handle.name, pairs, graph)
    return decode_custom_loss(encode_custom_loss(handle.name, pairs, graph))


# ---- hostile graphs


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


LP = node("placeholder", "logprobs", "logprobs")
OUT = node("output", "output", "output", {"tuple": [ref("loss"), {"dict": {}}]})
SUM = node("call_method", "loss", "sum", ref("x"))


def graph(*middle: dict[str, Any], last: dict[str, Any] = OUT) -> dict[str, Any]:
    return {"format": 1, "nodes": [LP, *middle, last]}


X = ref("logprobs")
