"""The check of a forward / forward_backward before it is accepted, and where it may be cut.

Everything a worker would trip over is found here, vectorised, so that a bad datum costs its sender an error and nobody
else any compute. Shapes: T tokens of a datum, N data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from weft.wire.codec import TrainBatch

from api.checks.provenance import check_spans
from api.errors import Invalid
from scheduler.order.plans import Slice
from store.settings import Limits
from workers.model.card import ModelCard
from workers.trainer.custom_format import CustomLoss
from workers.trainer.loss_inputs import LossInputError, check_loss, check_routes


def check_batch(batch: TrainBatch, card: ModelCard, limits: Limits, custom: CustomLoss | None = None) -> list[int]:
    """Check a decoded batch; `custom` is the uploaded loss that it names. Returns the number of tokens of each datum.
    Raises Invalid naming datum and field."""
    lengths = [len(datum.tokens) for datum in batch.data]
    _check_lengths(lengths, card, limits)
    _check_ids([datum.tokens for datum in batch.data], card.vocab_size, "model_input")
    try:
        check_loss(batch.loss_fn, batch.loss_fn_config, [datum.inputs for datum in batch.data], lengths, custom)
        check_routes([datum.inputs for datum in batch.data], lengths, card.config)
    except LossInputError as error:
        raise Invalid(str(error)) from None
    _check_ids([datum.inputs["target_tokens"].reshape(-1) for datum in batch.data], card.vocab_size, "target_tokens")
    check_spans(batch)
    return lengths


def slices(lengths: Sequence[int], slice_tokens: int) -> list[Slice]:
    """Cut an operation into ranges of its data, each of as many data as fit `slice_tokens`, at least one.

    Where it is cut depends on the operation's own data alone: floating-point sums then come out the same whoever
    shares the pass.

        slices([5, 5, 20, 1], 10) -> [Slice(0, 2, 10), Slice(2, 3, 20), Slice(3, 4, 1)]
    """
    cuts: list[Slice] = []
    for index, length in enumerate(lengths):
        if cuts and cuts[-1].tokens + length <= slice_tokens:
            cuts[-1] = Slice(cuts[-1].start, index + 1, cuts[-1].tokens + length)
        else:
            cuts.append(Slice(index, index + 1, length))
    return cuts


def _check_lengths(lengths: Sequence[int], card: ModelCard, limits: Limits) -> None:
    if not lengths:
        raise Invalid("data: empty; send at least one datum")
    if len(lengths) > limits.max_data:
        raise Invalid(f"data: {len(lengths)} data, the limit is {limits.max_data} per operation: send several")
    longest = min(card.context_length, limits.max_seq_len)
    for index, length in enumerate(lengths):
        if length == 0:
            raise Invalid(f"datum {index}: model_input is empty; it needs at least one token")
        if length > longest:
            raise Invalid(f"datum {index}: model_input has {length} tokens, the limit of {card.name} is {longest}")
    if sum(lengths) > limits.max_tokens_per_op:
        raise Invalid(f"data: {sum(lengths)} tokens, the limit is {limits.max_tokens_per_op} per operation")


def _check_ids(ids_N: Sequence[npt.NDArray[Any]], vocab_size: int, field: str) -> None:
    """One comparison over all data; only a failure is looked at datum by datum."""
    joined = np.concatenate(ids_N)
    if joined.size and int(joined.min()) >= 0 and int(joined.max()) < vocab_size:
        return
    for index, ids in enumerate(ids_N):
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if bad.size:
            position = int(bad[0])
            raise Invalid(
                f"datum {index}: {field} holds token {int(ids[position])} at position {position}; "
                f"this model's tokens are 0 to {vocab_size - 1}"
            )
