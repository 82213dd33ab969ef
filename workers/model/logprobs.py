"""Log-probabilities of chosen tokens without ever holding the logits of a whole batch, unless there is room for them.

Logits of 4k tokens over a 150k vocabulary are 2.4 GB; this holds those of one chunk, in the forward and again,
recomputed, in the backward. A device keeps what its free memory has room for instead: no layer's activations save so
much work for their bytes, and they are gone before the layers' own backward begins. A row with several targets is
computed once (rows U, targets P >= U). Chunks of a group are cut from the group's own start (LoraRows.slices), so a
group's sums do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.decoder import Decoder
from workers.model.device import sent
from workers.model.lora import products as lora_products
from workers.model.lora.base_mm import base_mm
from workers.model.lora.linear import adapters_backward, add_adapters
from workers.model.lora.products import LoraProducts, products_of
from workers.model.lora.rows import LoraRows
from workers.model.memory import SHARE, free_bytes

if TYPE_CHECKING:
    from workers.model.gpu.softmax import Logits


#: Rows of a chunk. A device has fewer copies of their logits, and multiplies more rows a little faster.
ROWS, DEVICE_ROWS = 1024, 2048


def target_logprobs(
    decoder: Decoder,
    hidden_TD: Tensor,
    rows_P: Tensor,
    targets_P: Tensor,
    lora: LoraRows | None = None,
    chunk: int | None = None,
    temperature_T: Tensor | None = None,
) -> Tensor:
    """lp_P = log_softmax(logits(hidden[rows]) / temperature[rows])[targets], float32. `rows_P` ascends, with a row
    repeated for each of its targets; where it lies in the host's memory, nobody waits for a device. `lora` counts the
    rows of `hidden_TD`. Differentiable in hidden; the gradient of an unembed adapter goes to `lora.grads`. A
    temperature of 1 changes no bit."""
    lora = lora if lora is not None else LoraRows([0, len(hidden_TD)], [None])
    if len(rows_P) != len(targets_P) or len(lora) != len(hidden_TD):
        counts = f"{len(rows_P)} rows, {len(targets_P)} targets; {len(hidden_TD)} hidden rows, {len(lora)} of adapters"
        raise ValueError(f"the inputs do not agree: {counts}")
    if decoder.isolation == "per-segment":
        lora = lora.kept_apart()
    rows_U, row_of_P = torch.unique_consecutive(rows_P, return_inverse=True)
    selected = lora.select(rows_U)
    trigger = selected.trigger(selected.groups(decoder.unembed.a))
    rows_U, placed_P = (
        each if each.device == hidden_TD.device else sent(each, hidden_TD.device) for each in (rows_U, row_of_P)
    )
    divisor_U = None if temperature_T is None else temperature_T.index_select(0, rows_U)
    if chunk is None:
        chunk = DEVICE_ROWS if lora_products.on_device(decoder.head) else ROWS
    head = _Head(decoder, selected.slices(chunk), (row_of_P, placed_P), divisor_U)
    hidden_UD = hidden_TD.index_select(0, rows_U)
    return cast(Tensor, _TargetLogprobs.apply(hidden_UD, trigger, targets_P.contiguous(), head))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Cut:
    """Rows a:b of the head and their targets p:q; `row_of` [q-p] is the row of each target, counted from a."""

    a: int
    b: int
    p: int
    q: int
    row_of: Tensor
    rows: LoraRows


class _Kept(NamedTuple):
    """The numbers that a cut on a device keeps for the backward: the log of each row's sum and, if they fit, the
    logits."""

    sums_R: Tensor
    logits: Logits | None


class _Head:
    """The unembedding of one call: how its rows are cut, and what each cut gives; `divisor_U` divides the logits."""

    def __init__(
        self,
        decoder: Decoder,
        pieces: Iterable[tuple[int, int, LoraRows]],
        row_of: tuple[Tensor, Tensor],
        divisor_U: Tensor | None,
    ) -> None:
        """`row_of` [P]: the row of each target, where it is known first, and where the rows are."""
        self.weight, self.site, self.divisor_U = decoder.head, decoder.unembed, divisor_U
        pieces, (row_of_P, placed_P) = list(pieces), row_of
        ends = torch.tensor([b for _, b, _ in pieces], device=row_of_P.device, dtype=row_of_P.dtype)
        at: list[int] = [0, *torch.searchsorted(row_of_P, ends).tolist()]
        self.cuts = [
            _Cut(a, b, at[i], at[i + 1], placed_P[at[i] : at[i + 1]] - a, of) for i, (a, b, of) in enumerate(pieces)
        ]

    def logprobs(self, hidden_RD: Tensor, cut: _Cut, targets: Tensor, keep: bool) -> tuple[Tensor, _Kept | None]:
        """The log-probabilities of a cut's targets; and, on a device, what `backward` uses."""
        if lora_products.on_device(self.weight):
            logits = self._on_device(hidden_RD, cut, targets)
            found_P, sums_R = logits.logprobs()
            return found_P, _Kept(sums_R, logits if keep else None)
        return torch.log_softmax(self._logits(hidden_RD, cut)[0], dim=-1)[cut.row_of, targets], None

    def backward(
        self, hidden_RD: Tensor, cut: _Cut, targets: Tensor, logprobs: Tensor, kept: _Kept | None, dlogprobs: Tensor
    ) -> Tensor:
        """The gradient of hidden; that of the adapters goes to their arenas."""
        if kept is not None:
            logits = kept.logits if kept.logits is not None else self._on_device(hidden_RD, cut, targets)
            u = logits.added.u_R if logits.added is not None else None
            dlogits_RV = logits.backward(logprobs, kept.sums_R, dlogprobs, self.weight.dtype)
        else:
            logits_RV, u = self._logits(hidden_RD, cut)
            # d lp / d (divided logits) = onehot(target) - softmax, added up over the targets of a row
            total_R = dlogprobs.new_zeros(cut.b - cut.a).index_add_(0, cut.row_of, dlogprobs)
            dlogits_RV = torch.softmax(logits_RV, dim=-1).mul_(-total_R[:, None])
            dlogits_RV.view(-1).index_add_(0, cut.row_of * dlogits_RV.shape[1] + targets, dlogprobs)
            self._divide(dlogits_RV, cut)
        dhidden_RD = base_mm(dlogits_RV, self.weight, transposed=True)
        products = self._products(cut)
        if products is not None and u is not None:
            adapters_backward(dlogits_RV, hidden_RD, dhidden_RD, u, self.site, products)
        return dhidden_RD

    def room(self) -> int:
        """The number of rows whose logits a device can keep, by the device's free memory."""
        if not lora_products.on_device(self.weight):
            return 0
        return int(SHARE * free_bytes(self.weight.device)) // (4 * len(self.weight))

    def _logits(self, hidden_RD: Tensor, cut: _Cut) -> tuple[Tensor, Tensor | None]:
        """The logits of one cut, and x A^T of its adapters."""
        logits_RV, products = base_mm(hidden_RD, self.weight), self._products(cut)
        u = add_adapters(logits_RV, hidden_RD, self.site, products) if products is not None else None
        return self._divide(logits_RV, cut), u

    def _on_device(self, hidden_RD: Tensor, cut: _Cut, targets: Tensor) -> Logits:
        """The base's logits; the adapters' part and the division are still to come."""
        from workers.model.gpu.softmax import Added, Logits  # Triton: only a GPU needs it

        added = Added.of(cut.rows, self._products(cut), hidden_RD, self.site)
        divisor_R = None if self.divisor_U is None else self.divisor_U[cut.a : cut.b]
        return Logits(base_mm(hidden_RD, self.weight), added, divisor_R, targets, cut.row_of)

    def _products(self, cut: _Cut) -> LoraProducts | None:
        return products_of(cut.rows, self.site.a, self.weight)

    def _divide(self, of_RV: Tensor, cut: _Cut) -> Tensor:
        """Divide in place: the logits, or d lp / d logits, which has the same factor."""
        return of_RV if self.divisor_U is None else of_RV.div_(self.divisor_U[cut.a : cut.b, None])


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_UD: Tensor, trigger: Tensor | None, targets_P: Tensor, head: _Head) -> Tensor:
        logprobs_P, ctx.kept = hidden_UD.new_empty(len(targets_P)), []
        room = head.room() if any(ctx.needs_input_grad) else 0
        for cut in head.cuts:
            hidden_RD, targets = hidden_UD[cut.a : cut.b], targets_P[cut.p : cut.q]
            logprobs_P[cut.p : cut.q], kept = head.logprobs(hidden_RD, cut, targets, cut.b <= room)
            ctx.kept.append(kept)
        ctx.save_for_backward(hidden_UD, targets_P, logprobs_P)
        ctx.head = head
        return logprobs_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs_P: Tensor) -> tuple[Tensor | None, ...]:
        hidden_UD, targets_P, logprobs_P = ctx.saved_tensors
        dhidden_UD = torch.empty_like(hidden_UD)
        for number, cut in enumerate(ctx.head.cuts):
            targets, logprobs, dlogprobs = (each[cut.p : cut.q] for each in (targets_P, logprobs_P, dlogprobs_P))
            own, kept = hidden_UD[cut.a : cut.b], ctx.kept[number]
            dhidden_UD[cut.a : cut.b] = ctx.head.backward(own, cut, targets, logprobs, kept, dlogprobs)
            ctx.kept[number] = kept = None
        return dhidden_UD, None, None, None
