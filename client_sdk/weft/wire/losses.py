"""Bodies of uploading a custom loss: its traced graph as plain data.

Nothing in a graph can be executed until the server rebuilds it from its own list of allowed operations.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from weft.wire.base import Count, Request, Response

__all__ = [
    "CreateCustomLossRequest",
    "CreateCustomLossResponse",
    "CustomLossGraph",
    "CustomLossInput",
    "CustomLossInputRank",
    "CustomLossNode",
    "CustomLossNodeOp",
]

#: A scalar, [T] or [T, K].
CustomLossInputRank = Literal[0, 1, 2]
CustomLossNodeOp = Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]


class CustomLossInput(Request):
    """`logprobs`, or a loss input of the data, and the rank that it has in every datum."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Request):
    """One node of the trace, as torch.fx records it; `target` is a qualified name such as `torch.exp`.

    Arguments are JSON scalars, lists, or one-key objects for anything else: {"ref": node}, {"tuple": [...]},
    {"dict": {...}}, {"slice": [start, stop, step]}, {"ellipsis": true}, {"float": "inf"} (or "-inf", "nan"),
    {"dtype": ...}, {"device": ...}, {"layout": ...}, {"memory_format": ...}.
    """

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class CustomLossGraph(Request):
    """Nodes in the order of their execution."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(Request):
    """`inputs` are the graph's placeholders in order, `logprobs` first; at most 16."""

    session_id: str
    custom_loss_seq_id: Count
    name: str
    inputs: Annotated[list[CustomLossInput], Field(min_length=1, max_length=16)]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"

    def body(self) -> dict[str, Any]:
        """Nulls stay: an argument that is None is an argument."""
        return self.model_dump(mode="json")


class CreateCustomLossResponse(Response):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
