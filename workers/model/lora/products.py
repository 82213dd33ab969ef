"""The low-rank products of all adapters in a batch: three products, each for all groups at once.

LoRA consists of them: with A [r, in] and B [out, r], u = x A^T is a `shrink` and y += u B^T an `expand`; the gradients
are the same two and `outer`. On a CPU they are C (native/), on a CUDA device Triton (gpu/). linear.py and
mixture/experts.py are written upon them.
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
    part. W is the tensor called `name`, [stack * rank, wide] as stored. `scaled`: also multiply by the scale of the
    group's adapter. Groups without the tensor are left out. x and y may be of any float dtype.

    Invariant (isolation): a group's results depend on its own rows alone."""

    @property
    def max_rank(self) -> int: ...

    def experts(self, routing: Routing, rows: LoraRows) -> LoraProducts:
        """The same groups over the (token, expert) pairs of `routing`; W is then the factor of the pair's group and
        expert."""

    def room(self, like: Tensor, stack: int = 1) -> Tensor:
        """A new `u` for `shrink`, with as many rows as `like`."""

    def shrink(self, x: Tensor, u: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """u[:, part] = x W^T."""

    def expand(self, y: Tensor, u: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """y += u[:, part] W, in place. Reads only those columns of u that `shrink` wrote."""

    def add(self, y: Tensor, x: Tensor | None, u: Tensor, a: str, parts: Parts, *, scaled: bool) -> None:
        """`shrink` x to u with the stacked `a`, unless x is None; then `expand` part after part of u to the columns of
        y for it. `parts`: the name of each part's B and the width of its columns."""

    def outer(self, u: Tensor, y: Tensor, name: str, *, part: int = 0, stack: int = 1, scaled: bool) -> None:
        """Add u[:, part]^T y, over each group's rows (of each expert), to the gradient of W. Groups that share a
        gradient add to it in their order."""


class Added(NamedTuple):
    """u W, to be added to rows: W is each group's factor `name`, of `stack` stacked ones."""

    products: LoraProducts
    u_T: Tensor
    name: str
    stack: int = 1


def products_of(rows: LoraRows | None, name: str, weight: Tensor) -> LoraProducts | None:
    """The products for adapters beside the base's `weight`; None if none of the adapters has the tensor `name`."""
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
