"""One forward or forward_backward operation while it is being computed, possibly over several passes.

Its gradient is accumulated under the operation's own id (`RunState.gradient_of`) and added to the run's only when the
whole operation has succeeded. So an operation that fails leaves its run as it was, and other operations of the run in
the same pass never touch it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from weft.wire.account.limits import ModelLimits
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch, decode_train_request, encode_train_output
from weft.wire.checks.batches import BatchRules, batch_problems, refusal
from weft.wire.checks.losses import CUSTOM, WITH_CUSTOM, loss_id_of
from weft.wire.error import WireError

from scheduler.links.messages import Failure, OpKind, TrainOp
from workers.model.adapters.adapter import Adapter
from workers.model.config import DecoderConfig
from workers.trainer.losses.custom import UploadedLoss
from workers.trainer.metrics import Measure, balance_metrics, merge_measures, metric_values
from workers.trainer.runs.state import PartDone, RunState

InLoss = Callable[["Part"], AbstractContextManager[None]]


@dataclass(eq=False)
class Progress:
    """`parts` are the data ranges computed so far, in order; `waiting` those planned and not yet computed."""

    op: TrainOp
    run: RunState
    batch: TrainBatch
    custom: UploadedLoss | None = None
    parts: list[Part] = field(default_factory=list)
    waiting: int = 0
    ended: bool = False  # the slice that completes the operation has come
    tokens: int = 0
    outputs: list[dict[str, np.ndarray[Any, Any]]] = field(default_factory=list)
    measures: dict[str, Measure] = field(default_factory=dict)
    experts_LE: Tensor | None = None  # tokens per mixture layer and expert
    failure: Failure | None = None
    unfit: bool = False  # a part of it failed for lack of memory
    saved: bool = False  # its run's snapshot holds a part of it, behind which it would be sent again
    in_loss: InLoss = field(default=lambda part: nullcontext())  # what the loss of a part is computed within

    @property
    def complete(self) -> bool:
        return self.ended and not self.waiting

    @property
    def trains(self) -> bool:
        return self.op.kind is OpKind.FORWARD_BACKWARD

    @property
    def grad(self) -> Adapter | None:
        """The arena that accumulates its gradient, if it trains; the run must be in memory."""
        return self.run.gradient_of(self.op.op_id) if self.trains else None

    def abandon(self) -> None:
        """The operation will never be complete."""
        self.run.give_up(self.op.op_id)

    def part_done(self) -> PartDone:
        """The facts that a snapshot must hold so that another trainer can continue the operation from here."""
        return PartDone(
            op_id=self.op.op_id,
            stop=self.parts[-1].stop,
            parts=[(part.start, part.stop, part.tokens) for part in self.parts],
            outputs=self.outputs,
            measures={name: (measure.total, measure.weight) for name, measure in self.measures.items()},
            experts_LE=self.experts_LE,
        )

    def go_on_from(self, done: PartDone) -> None:
        """Take over what another trainer has computed of this operation; its gradient is in the run already."""
        self.saved = True
        self.parts = [Part(self, start, stop, tokens) for start, stop, tokens in done.parts]
        self.tokens = sum(part.tokens for part in self.parts)
        self.outputs, self.experts_LE = list(done.outputs), done.experts_LE
        self.measures = {name: Measure(total, weight) for name, (total, weight) in done.measures.items()}

    def fail(self, message: str, category: str = "server", *, ran: bool = False) -> None:
        """Mark the operation as failed; only the first reason counts."""
        self.failure = self.failure or Failure(message, category, ran)

    def about_weights(self) -> str:
        """A sentence about weights that have grown too large: a step that is far too large succeeds, but no pass after
        it can be computed."""
        largest = float(self.run.adapter.flat.abs().amax())
        return (
            f"the largest of this run's weights is {largest:.3g}: if its steps were too large, load a checkpoint from "
            "before them (load_state), and go on with a smaller learning rate"
        )

    def add(
        self,
        part: Part,
        outputs: list[dict[str, np.ndarray[Any, Any]]],
        measures: dict[str, Measure],
        experts_LE: Tensor,
    ) -> None:
        """Take the results of one part; parts come in data order."""
        self.parts.append(part)
        self.run.unsaved_tokens += part.tokens if self.trains else 0
        self.experts_LE = experts_LE if self.experts_LE is None else self.experts_LE + experts_LE
        self.tokens += part.tokens
        self.outputs += outputs
        merge_measures(self.measures, measures)

    def restart(self) -> list[Part]:
        """Forget all results, and return the parts to compute again."""
        parts, self.parts = self.parts, []
        self.tokens, self.outputs, self.measures, self.experts_LE = 0, [], {}, None
        if self.run.gathers(self.op.op_id) and (grad := self.grad) is not None:
            grad.flat.zero_()
        return parts

    def finish(self) -> tuple[bytes, Failure | None]:
        """Give the operation's gradient to the run, and return its encoded result; or the failure, if it failed, with
        the run unchanged. Call it once, or again after running out of memory, which changes nothing."""
        grad = self.grad if self.failure is None else None
        if grad is not None and not _is_finite(grad.flat):
            said = f"the gradient that this operation gives the adapter is not finite; {self.about_weights()}"
            self.fail(said, "user", ran=True)
        elif grad is not None and self._spoils_the_sum(grad):
            said = "with this operation's gradient the sum of all since the last step is beyond float32"
            self.fail(f"{said}: scale weights or advantages down", "user", ran=True)
        if self.failure is not None:
            self.abandon()
            return b"", self.failure
        metrics = metric_values(self.measures)
        if self.experts_LE is not None:
            metrics |= balance_metrics(self.experts_LE)
        payload = encode_train_output(self.outputs, metrics)
        if grad is not None:
            self.run.accumulate(self.op.op_id)
        return payload, None

    def _spoils_the_sum(self, grad: Adapter) -> bool:
        """True if the sum of all gradients since the last step would not be finite with this one. Never for replays:
        their operations have been answered."""
        before = self.run.grad
        return before is not None and not self.op.replay and not _is_finite(grad.flat + before.flat)


def _is_finite(flat: Tensor) -> bool:
    """True if all numbers are finite. Takes one pass, and no tensor of that size: a NaN counts as the largest
    number."""
    return math.isfinite(float(torch.linalg.vector_norm(flat, math.inf)))


@dataclass(frozen=True, eq=False)
class Part:
    """Data start:stop of one operation: one LoRA group of a microbatch."""

    progress: Progress
    start: int
    stop: int
    tokens: int

    @property
    def data(self) -> Sequence[ArrayDatum]:
        return self.progress.batch.data[self.start : self.stop]

    @property
    def trains(self) -> bool:
        return self.progress.trains


class BadOperation(ValueError):
    """The body of an operation cannot be executed, by the fault of the user."""


def begin(
    op: TrainOp, run: RunState, body: bytes, config: DecoderConfig, custom_loss: Callable[[str], UploadedLoss]
) -> Progress:
    """Decode and check an operation's body, for a model of this `config`. `custom_loss` finds an uploaded loss by its
    id. What is repeated is not checked: it was accepted, and the rules may be others by now.

    Raises BadOperation naming datum and field."""
    try:
        batch = decode_train_request(body)
    except WireError as error:
        raise BadOperation(str(error)) from error
    loss_id = loss_id_of(batch.loss_fn_config) if batch.loss_fn == CUSTOM else None
    custom = None if loss_id is None else custom_loss(loss_id)
    model = ModelLimits(
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        num_experts=config.num_experts,
        mixture_layers=len(config.mixture_layers),
        experts_per_token=config.experts_per_token,
    )
    rules = BatchRules(WITH_CUSTOM, model, reads=custom.loss.reads if custom else None)
    for found in () if op.replay else batch_problems(batch, rules):
        raise BadOperation(refusal(found))
    return Progress(op, run, batch, custom)
