"""The check of a forward / forward_backward before it is accepted, and the cost of its data in the fair order."""

from __future__ import annotations

from collections.abc import Sequence

from weft.wire import LimitsResponse
from weft.wire.binary.train_codec import TrainBatch
from weft.wire.checks.batches import BatchRules, batch_problems, refusal, size_problems
from weft.wire.checks.custom_cost import work_of
from weft.wire.checks.custom_format import CustomLoss
from weft.wire.checks.custom_shapes import CustomLossError

from api.errors import Invalid, refuse


def check_batch(batch: TrainBatch, limits: LimitsResponse, model: str, custom: CustomLoss | None = None) -> list[int]:
    """Check a decoded batch for the base model `model`; `custom` is the uploaded loss that it names. Returns the number
    of tokens of each datum. Raises Invalid naming datum and field."""
    lengths = [len(datum.tokens) for datum in batch.data]
    refuse(size_problems(lengths, limits))
    rules = BatchRules(limits.losses, limits.models[model], model, custom.reads if custom else None)
    for found in batch_problems(batch, rules):
        raise Invalid(refusal(found))
    return lengths


def costs(batch: TrainBatch, lengths: Sequence[int], custom: CustomLoss | None) -> list[int]:
    """The cost of each datum in the fair order: its tokens and the work of the uploaded loss. Raises Invalid."""
    if custom is None:
        return list(lengths)
    try:
        return [tokens + work for tokens, work in zip(lengths, work_of(custom, batch.data), strict=True)]
    except CustomLossError as error:
        raise Invalid(str(error)) from None
