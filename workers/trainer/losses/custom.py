"""Uploaded losses: those a trainer has used lately, and their evaluation on a part of an operation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor
from weft.wire.binary.train_codec import ArrayDatum
from weft.wire.checks.custom_cost import DatumPlan, input_shapes, most_work, plan_datum
from weft.wire.checks.custom_format import CustomLoss, decode_custom_loss
from weft.wire.checks.custom_shapes import CustomLossError, Shape

from scheduler.links.messages import loss_ref
from store.blobs.contract import Blobs
from workers.trainer.losses.custom_graph import run_custom_loss, shape_of
from workers.trainer.metrics import Measure

#: How many losses are kept; a parsed graph of the largest size takes about a megabyte.
KEPT = 64
#: How many plans of each loss are kept, each for different sizes of data.
PLANS_KEPT = 4


class UploadedLoss:
    """A loss, with its plans for the sizes of data that were met last."""

    def __init__(self, loss: CustomLoss) -> None:
        self.loss = loss
        self._plans: OrderedDict[tuple[Shape, ...], DatumPlan] = OrderedDict()

    def plan(self, shapes: tuple[Shape, ...]) -> DatumPlan:
        """The plan for inputs of these shapes. Raises CustomLossError if the loss does not allow them."""
        plan = self._plans.pop(shapes, None) or plan_datum(self.loss, shapes)
        self._plans[shapes] = plan
        if len(self._plans) > PLANS_KEPT:
            self._plans.popitem(last=False)
        return plan


class CustomLosses:
    """Losses by id, read from their blobs; the KEPT most recently used stay in memory."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._kept: OrderedDict[str, UploadedLoss] = OrderedDict()

    def get(self, loss_id: str) -> UploadedLoss:
        """The loss of this id, read from its blob if it is not in memory."""
        loss = self._kept.pop(loss_id, None)
        loss = loss or UploadedLoss(decode_custom_loss(self._blobs.get(loss_ref(loss_id))))
        self._kept[loss_id] = loss
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return loss


def custom_loss(
    uploaded: UploadedLoss, lp_P: Tensor, data: Sequence[ArrayDatum], first: int = 0
) -> tuple[Tensor, dict[str, Measure]]:
    """The sum of the loss over `data`, a scalar on the device of `lp_P`, whose log-probabilities lie end to end in
    `lp_P` float32; and its metrics: `:sum` adds up over data, `:mean` averages over them. Raises CustomLossError naming
    the datum, counted from `first`, and the node of the graph."""
    loss = uploaded.loss
    total, measures = lp_P.new_zeros(()), {name: Measure(0.0, 0.0) for name in loss.metrics}
    parts = torch.split(lp_P.cpu(), [datum.inputs["target_tokens"].size for datum in data])
    for index, (datum, part) in enumerate(zip(data, parts, strict=True), start=first):
        logprobs = part.reshape(datum.inputs["target_tokens"].shape)
        inputs = [logprobs, *_inputs(loss, datum)]
        try:
            plan = uploaded.plan(tuple(shape_of(tensor) for tensor in inputs))
            result, metrics = run_custom_loss(loss, inputs, plan)
            if logprobs.requires_grad and not result.requires_grad:
                raise CustomLossError(f"custom loss {loss.name!r} does not depend on the logprobs: it has no gradient")
        except CustomLossError as error:
            raise CustomLossError(f"datum {index}: {error}") from None
        total = total + result.to(total.dtype).to(total.device)
        for name, value in metrics.items():
            measures[name] = Measure(measures[name].total + value, measures[name].weight + 1)
    known = {"loss:sum": Measure(float(total.detach())), "tokens:sum": Measure(float(lp_P.numel()))}
    return total, {**known, **measures}


def most_work_of(uploaded: UploadedLoss, data: Sequence[ArrayDatum]) -> int:
    """The most that the loss can cost on these data, in the unit of `weft.wire.checks.custom_cost`."""
    return sum(most_work(uploaded.loss, input_shapes(uploaded.loss, datum)) for datum in data)


def _inputs(loss: CustomLoss, datum: ArrayDatum) -> list[Tensor]:
    """The loss's inputs as copies, so that a graph cannot change the batch."""
    found = []
    for name, rank in loss.inputs[1:]:
        array = datum.inputs[name]
        found.append(torch.tensor(array.reshape(()) if rank == 0 else array))
    return found
