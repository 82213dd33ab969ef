"""`forward_backward_custom`: any differentiable loss of the logprobs, computed by the user with torch; or, if it can be
traced and the server runs such losses, sent there.

The service's cross entropy is linear in its weights, L = -sum lp * w, so its gradient with w = -dC/dlp is that of C.
Two passes, then: one forward for the logprobs, the user's loss here, and one backward with those weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import APIResponseValidationError, WeftError
from weft.loss_handle import LossHandle
from weft.packages import imported
from weft.runs.lane import Turn
from weft.runs.run import Run
from weft.runs.session import Session
from weft.transport.http import encode, parse
from weft.transport.poll import fetch_result
from weft.wire.checks.losses import OF_THE_FORWARD
from weft.wire.inputs import Datum
from weft.wire.losses import CreateCustomLossRequest, CreateCustomLossResponse
from weft.wire.service import UntypedAPIFuture
from weft.wire.tensor import TensorData
from weft.wire.training import ForwardBackwardOutput

if TYPE_CHECKING:
    import torch

#: (data, logprobs of each datum, shaped as its target tokens) -> (loss, metrics)
CustomLoss = Callable[[list[Datum], list["torch.Tensor"]], "tuple[torch.Tensor, dict[str, float]]"]


@dataclass(frozen=True)
class Differentiated:
    """The user's loss and metrics, and the data of the second pass."""

    loss: float
    metrics: dict[str, float]
    data: list[Datum]


def require_torch() -> Any:
    """torch, or an error that says what to do."""
    return imported("torch", "forward_backward_custom differentiates your loss with torch: pip install torch")


async def run_custom(run: Run, data: Sequence[Datum], loss_fn: CustomLoss, told: bool) -> ForwardBackwardOutput:
    """Both passes, in one turn: operations called later stay behind the second. `told`: see `Run.add_gradient`."""
    require_torch()
    given = list(data)
    if not given:
        raise WeftError("forward_backward_custom needs at least one datum")

    async def both(turn: Turn) -> tuple[Differentiated, list[str]]:
        parts = run.parts([forward_datum(datum) for datum in given])
        output = await run.fetch_parts(await run.submit_parts(turn, parts, "cross_entropy", None, True))
        mine = await asyncio.to_thread(differentiate, given, output, loss_fn)
        sizes = np.cumsum([len(part) for part in parts]).tolist()
        backward = [mine.data[start:stop] for start, stop in zip([0, *sizes], sizes, strict=False)]
        return mine, await run.submit_parts(turn, backward, "cross_entropy", None, False)

    mine, ids = await run.add_gradient(both, told)
    return _with_metrics(await run.fetch_parts(ids), mine)


def forward_datum(datum: Datum) -> Datum:
    """The targets, weights of the same shape, which the forward pass does not use, and what changes the logprobs."""
    targets = _targets(datum)
    shape = targets.to_numpy().shape
    weights = datum.loss_fn_inputs.get("weights") or TensorData.from_dense(np.zeros(shape, np.float32))
    return _replace(datum, targets, weights)


def _targets(datum: Datum) -> TensorData:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise WeftError("forward_backward_custom needs target_tokens in every datum")
    return targets


def _replace(datum: Datum, targets: TensorData, weights: TensorData) -> Datum:
    inputs = {"target_tokens": targets, "weights": weights}
    inputs |= {name: datum.loss_fn_inputs[name] for name in OF_THE_FORWARD if name in datum.loss_fn_inputs}
    return Datum(datum.model_input, inputs, datum.model_input_spans, datum.loss_fn_input_spans)


def differentiate(data: list[Datum], output: ForwardBackwardOutput, loss_fn: CustomLoss) -> Differentiated:
    """Run the user's loss on the logprobs of the first pass, and make the second pass of its gradient."""
    torch = require_torch()
    if len(output.loss_fn_outputs) != len(data):
        raise APIResponseValidationError(f"{len(output.loss_fn_outputs)} outputs for {len(data)} data")
    logprobs = [result["logprobs"].to_torch().requires_grad_(True) for result in output.loss_fn_outputs]
    with torch.enable_grad():
        loss, metrics = _returned(loss_fn(data, logprobs))
    if not loss.requires_grad:
        raise WeftError(
            "the loss that yours returned does not depend on the logprobs, so there is no gradient: compute it from "
            "the logprobs that it is given, without detach(), .item(), numpy or comparisons alone"
        )
    grads = torch.autograd.grad(loss.reshape(()), logprobs, allow_unused=True)
    weights = [
        np.zeros(lp.shape, np.float32) if g is None else -g.numpy() for lp, g in zip(logprobs, grads, strict=True)
    ]
    for index, weight in enumerate(weights):
        if (bad := np.flatnonzero(~np.isfinite(weight))).size:
            value = -float(weight.flat[bad[0]])
            what = f"the gradient of your loss is {value} at element {bad[0]} of its logprobs; it must be finite"
            raise WeftError(f"datum {index}: {what}")
    second = [
        _replace(datum, _targets(datum), TensorData.from_dense(weight))
        for datum, weight in zip(data, weights, strict=True)
    ]
    return Differentiated(float(loss.detach()), metrics, second)


def _returned(answer: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """What the user's loss returned: the loss, and its metrics as numbers."""
    torch = require_torch()
    loss, metrics = answer if isinstance(answer, tuple | list) and len(answer) == 2 else (None, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not isinstance(metrics, Mapping):
        raise WeftError(
            "a custom loss must return (loss, metrics), a tensor of one element and a dict of numbers; "
            f"yours returned {answer!r:.200}"
        )
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise WeftError(f"metric {name!r} of your loss must be one number, got {value!r:.80}") from None
    return loss, numbers


def _with_metrics(output: ForwardBackwardOutput, mine: Differentiated) -> ForwardBackwardOutput:
    """The server's metrics and the user's; `loss:sum` is the user's loss, the server's is `surrogate_loss:sum`."""
    server = dict(output.metrics)
    surrogate = server.pop("loss:sum")
    metrics = {**server, **mine.metrics, "loss:sum": mine.loss, "surrogate_loss:sum": surrogate}
    return ForwardBackwardOutput(output.loss_fn_output_type, output.loss_fn_outputs, metrics)


async def upload_loss(session: Session, handle: LossHandle) -> LossHandle:
    """The handle with the server's id of it, or without where losses are run by the client."""
    session_id = await session.id()
    if not session.config.custom_loss_server_side:
        return replace(handle, session_id=session_id)
    request = CreateCustomLossRequest(
        session_id=session_id,
        custom_loss_seq_id=next(session.loss_numbers),
        name=handle.name,
        inputs=list(handle.inputs),
        graph=handle.encoded(),
    )
    transport = session.transport
    future = await transport.ask("POST", "/create_custom_loss", UntypedAPIFuture, encode(request.body()))
    made = await fetch_result(transport, future.request_id, lambda answer: parse(answer, CreateCustomLossResponse))
    return replace(handle, session_id=session_id, loss_id=made.loss_id)
