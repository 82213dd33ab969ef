"""Log-probabilities over a vocabulary on a device. Logits with the adapters' part, divided by the temperature, are
never written to memory: the base's logits are read once in the forward and once in the backward, which rounds their
gradient once, to the dtype of the next products. workers/model/logprobs.py calls it.

Shapes: R rows, V vocabulary, r rank, P targets. Target p belongs to row `row_of[p]`, which ascends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from workers.model.gpu import softmax_kernels
from workers.model.gpu.launch import HELD, Tile, TritonProducts, where
from workers.model.gpu.segments import DENSE_ROWS
from workers.model.lora.linear import Site
from workers.model.lora.products import LoraProducts
from workers.model.lora.rows import LoraRows

#: Not yet tuned on a GPU (bench/gpu_tiles.py).
FORWARD, BACKWARD = Tile(128, 4), Tile(128, 4)
#: Columns that a block of `log_sum` adds up, so that even few rows are many blocks.
SPLIT = 2048
#: How many ranks (or targets of the same row) the kernels of single targets add up at a time.
TOGETHER = 16


class Added(NamedTuple):
    """The adapters' part of the logits of `rows`: scale * u B^T, where u = x A^T [R, >= r] float32 and `b` names B."""

    rows: LoraRows
    products: TritonProducts
    u_R: Tensor
    b: str

    @classmethod
    def of(cls, rows: LoraRows, products: LoraProducts | None, x_RD: Tensor, site: Site) -> Added | None:
        if products is None:
            return None
        assert isinstance(products, TritonProducts), "what is decoded has no targets"
        u_R = products.room(x_RD)
        products.shrink(x_RD, u_R, site.a, scaled=False)
        return cls(rows, products, u_R, site.b[0])

    @property
    def factors(self) -> tuple[Any, ...]:
        return self.u_R, self.u_R.stride(0), self.products.table.weights(self.b)


class Logits(NamedTuple):
    """x = (base's logits [R, V] float32 + the adapters' part) / divisor [R], and the targets [P] whose
    log-probabilities are asked for. `divisor_R` are temperatures; None: 1."""

    base_RV: Tensor
    added: Added | None
    divisor_R: Tensor | None
    targets_P: Tensor
    row_of_P: Tensor

    def logprobs(self) -> tuple[Tensor, Tensor]:
        """The log-probabilities of the targets, float32 [P]; and the log of each row's sum of exponentials, float32
        [R], which the backward needs."""
        base, wide = self.base_RV, self.base_RV.shape[1]
        sums_SR, found_P = base.new_empty(triton.cdiv(wide, SPLIT), len(base)), base.new_empty(len(self.row_of_P))
        for blocks, arguments, fixed in self._launches(FORWARD):
            held = fixed["ADAPTED"] and fixed["BLOCK_R"] <= HELD
            softmax_kernels.log_sum[blocks, len(sums_SR)](*arguments, sums_SR, HELD=held, SPLIT=SPLIT, **fixed)
        adapters: tuple[Any, ...] = (base, 0, *[base] * 4)
        if (added := self.added) is not None:
            table = added.products.table
            adapters = *added.factors, table.ranks_G, table.scales_G, added.rows.group_of_row(base.device)
        if len(found_P):
            softmax_kernels.at_targets[len(found_P),](
                base, base.stride(0), *adapters, self._divisors, wide, self.row_of_P, self.targets_P, found_P,
                ADAPTED=added is not None, DIVIDED=self.divisor_R is not None, BLOCK_R=TOGETHER, num_warps=1,
            )  # fmt: skip
        sums_R = sums_SR.logsumexp(0)
        return found_P - sums_R[self.row_of_P], sums_R

    def backward(self, logprobs_P: Tensor, sums_R: Tensor, dlogprobs_P: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of the base's logits, which is that of the adapters' part as well: [R, V], rounded once to
        `dtype`."""
        rows, wide = self.base_RV.shape
        dlogits_RV, dlogprobs_P = self.base_RV.new_empty(rows, wide, dtype=dtype), dlogprobs_P.contiguous()
        first_R1 = torch.searchsorted(self.row_of_P, torch.arange(rows + 1, device=dlogprobs_P.device))
        # Adds in the order of a row's targets; `index_add` adds in any order.
        dsums_R = -torch.segment_reduce(dlogprobs_P, "sum", offsets=first_R1, unsafe=True)
        for blocks, arguments, fixed in self._launches(BACKWARD):
            grid = blocks, triton.cdiv(wide, fixed["BLOCK_N"])
            softmax_kernels.log_sum_backward[grid](*arguments, sums_R, dsums_R, dlogits_RV, **fixed)
        if len(dlogprobs_P):
            softmax_kernels.at_targets_backward[len(dlogprobs_P),](
                logprobs_P, dlogprobs_P, self.row_of_P, self.targets_P, first_R1, dsums_R, self._divisors, dlogits_RV,
                wide, DIVIDED=self.divisor_R is not None, BLOCK_P=TOGETHER, num_warps=1,
            )  # fmt: skip
        return dlogits_RV

    @property
    def _divisors(self) -> Tensor:
        return self.divisor_R if self.divisor_R is not None else self.base_RV

    def _launches(self, tile: Tile) -> Iterator[tuple[int, tuple[Any, ...], dict[str, Any]]]:
        """For each launch: its blocks of rows, the arguments up to `wide`, and the constants that are compiled into it.
        If some rows lack an adapter, a first launch computes all rows as if none had one."""
        (rows, wide), base, added = self.base_RV.shape, self.base_RV, self.added
        rest = self._divisors, rows, wide
        fixed = {"DIVIDED": self.divisor_R is not None, "BLOCK_M": DENSE_ROWS}
        if not rows:
            return
        if added is None or not added.products.table.all_have(added.b):
            unused = base, 0, *[base] * 6, 1, 1
            of = {"ADAPTED": False, "PRECISION": "ieee", "BLOCK_R": 16}
            yield triton.cdiv(rows, DENSE_ROWS), (base, base.stride(0), *unused, *rest), fixed | of | tile.fixed
        if added is None:
            return
        for each, blocks in added.products.blocks:
            places = where(added.products.table, blocks, added.products.segments)
            of = {"ADAPTED": True, "PRECISION": added.products.precision.name, "BLOCK_R": each.block}
            arguments = base, base.stride(0), *added.factors, *places, *rest
            yield len(blocks.segment), arguments, fixed | of | tile.beside(each.block).fixed
