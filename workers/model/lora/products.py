"""The low-rank products of all adapters in a batch, on any device: three products that serve all groups at once.

All of LoRA is made of them: with A [r, in] and B [out, r], u = x A^T is a `shrink` and y += u B^T an `expand`;
their gradients are the same two and `outer`. On a CPU they are C (native/), on a CUDA device Triton (gpu/).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workers.model.lora.rows import LoraRows
from workers.model.native.launch import NativeProducts, Parts
from workers.model.routing import Routing


class LoraProducts(Protocol):
    """`u` is [rows, stack * max_rank] float32; a group uses the first stack * rank columns of its rows, part beside
    part. `scaled` multiplies by the scale of the group's adapter. Groups without the tensor `name` are left out."""

    @property
    def max_rank(self) -> int: ...

    def experts(self, routing: Routing, rows: LoraRows) -> LoraProducts:
        """The same groups over the (token, expert) pairs of `routing`, each with the factor of its group and expert."""

    def room(self, like: Tensor, stack: int = 1) -> Tensor:
        """A new `u` for `shrink`, with as many rows as `like`. `expand` reads only what `shrink` has written."""

    def shrink(self, x: Tensor, u: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """u[:, part] = x W^T of each row's group (and expert), for the tensor W called `name`."""

    def expand(self, y: Tensor, u: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """y += u[:, part] W in place."""

    def add(self, y: Tensor, x: Tensor | None, u: Tensor, a: str, parts: Parts, *, scaled: bool) -> None:
        """`shrink` x to u with the stacked `a`, unless x is None, and `expand` u to the columns of each of `parts`."""

    def outer(self, u: Tensor, y: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """Add u[:, part]^T y over each group's rows (of each expert) to the gradient of the tensor `name`. Groups that
        share a gradient add to it in the order of their rows."""


class Added(NamedTuple):
    """u W of each group's stacked factor W called `name`, to be added to rows."""

    products: LoraProducts
    u_T: Tensor
    name: str
    stack: int = 1


def products_of(rows: LoraRows | None, name: str, weight: Tensor) -> LoraProducts | None:
    """The products of the adapters beside the base's `weight`; None when none of them has the tensor `name`."""
    if rows is None or not rows.groups(name):
        return None
    return _on_device(rows, name, weight.dtype) if on_device(weight) else NativeProducts.dense(rows)


def on_device(weight: Tensor) -> bool:
    return weight.is_cuda


def _on_device(rows: LoraRows, name: str, base: torch.dtype) -> LoraProducts:
    from workers.model.gpu.launch import TritonProducts  # Triton: only a GPU needs it
    from workers.model.gpu.segments import table_of
    from workers.model.gpu.single import SingleProducts

    table = table_of(rows)
    return SingleProducts(table) if table.single else TritonProducts.dense(rows, name, base)
