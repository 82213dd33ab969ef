"""Log-probabilities of chosen tokens without ever holding the logits of a whole batch.

Logits of 4k tokens over a 150k vocabulary are 2.4 GB; this holds those of one chunk, in the forward and again,
recomputed, in the backward. Chunks of a group are cut from the group's own start (LoraRows.slices), so a group's sums
do not depend on its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.lora import LoraRows, adapter_backward, add_adapter, base_mm

if TYPE_CHECKING:
    from workers.model.decoder import Decoder


def target_logprobs(
    decoder: Decoder,
    hidden_TD: Tensor,
    rows_P: Tensor,
    targets_P: Tensor,
    lora: LoraRows | None = None,
    chunk: int = 1024,
) -> Tensor:
    """lp_P = log_softmax(logits(hidden[rows]))[targets], float32. `rows_P` ascends (repeats allowed), `lora` counts
    the rows of `hidden_TD`. Differentiable in hidden; the gradient of an unembed adapter goes to `lora.grads`."""
    lora = lora if lora is not None else LoraRows([0, len(hidden_TD)], [None])
    if len(rows_P) != len(targets_P) or len(lora) != len(hidden_TD):
        counts = f"{len(rows_P)} rows, {len(targets_P)} targets; {len(hidden_TD)} hidden rows, {len(lora)} of adapters"
        raise ValueError(f"the inputs do not agree: {counts}")
    selected = lora.select(rows_P)
    trigger = selected.trigger(selected.groups(decoder.unembed.a))
    head = _Head(decoder, selected, chunk)
    hidden_PD = hidden_TD.index_select(0, rows_P)
    return cast(Tensor, _TargetLogprobs.apply(hidden_PD, trigger, targets_P, head))  # type: ignore[no-untyped-call]


class _Head:
    """The unembedding of one call: how its rows are cut, and the products of one cut."""

    def __init__(self, decoder: Decoder, rows: LoraRows, chunk: int) -> None:
        self.weight, self.site = decoder.head, decoder.unembed
        self.cuts = list(rows.slices(chunk))

    def logits(self, hidden_RD: Tensor, rows: LoraRows) -> tuple[Tensor, list[Tensor]]:
        logits_RV = base_mm(hidden_RD, self.weight)
        return logits_RV, [add_adapter(logits_RV, hidden_RD, self.site, g) for g in rows.groups(self.site.a)]

    def backward(self, dlogits_RV: Tensor, hidden_RD: Tensor, us: list[Tensor], rows: LoraRows) -> Tensor:
        dhidden_RD = base_mm(dlogits_RV, self.weight, transposed=True)
        for group, u in zip(rows.groups(self.site.a), us, strict=True):
            adapter_backward(dlogits_RV, hidden_RD, dhidden_RD, u, self.site, group)
        return dhidden_RD


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_PD: Tensor, trigger: Tensor | None, targets_P: Tensor, head: _Head) -> Tensor:
        logprobs_P = hidden_PD.new_empty(len(hidden_PD))
        for a, b, rows in head.cuts:
            logits_RV, _ = head.logits(hidden_PD[a:b], rows)
            chosen = torch.log_softmax(logits_RV, dim=-1).gather(1, targets_P[a:b, None])
            logprobs_P[a:b] = chosen.squeeze(1)
        ctx.save_for_backward(hidden_PD, targets_P)
        ctx.head = head
        return logprobs_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs_P: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PD, targets_P = ctx.saved_tensors
        dhidden_PD = torch.empty_like(hidden_PD)
        for a, b, rows in ctx.head.cuts:
            logits_RV, us = ctx.head.logits(hidden_PD[a:b], rows)
            # d lp / d logits = onehot(target) - softmax
            dlogits_RV = torch.softmax(logits_RV, dim=-1).mul_(-dlogprobs_P[a:b, None])
            dlogits_RV.scatter_add_(1, targets_P[a:b, None], dlogprobs_P[a:b, None])
            dhidden_PD[a:b] = ctx.head.backward(dlogits_RV, hidden_PD[a:b], us, rows)
        return dhidden_PD, None, None, None
