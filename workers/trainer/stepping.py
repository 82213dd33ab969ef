"""The optimizer steps of one stage, from encoded requests to encoded results."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from pydantic import ValidationError
from weft.wire import AdamParams, OptimStepRequest

from workers.trainer.optimizer import Adam, AdamError, Step, step_many
from workers.trainer.state import RunState


def step_runs(due: Sequence[tuple[RunState, bytes]]) -> list[bytes | Exception]:
    """Update every run with its accumulated gradient (zero if there is none) by the OptimStepRequest in its body, and
    clear the gradient. Each run gets the encoded result, or the error that kept it as it was.

    An error of the update itself is not caught: runs may be half updated, and a lost trainer is rebuilt by replay."""
    results: list[bytes | Exception] = []
    steps: list[Step] = []
    for run, body in due:
        try:
            steps.append(_step(run, _adam(body)))
            results.append(b"")
        except AdamError as error:
            results.append(error)
    ready = [i for i, result in enumerate(results) if not isinstance(result, Exception)]
    for i, metrics in zip(ready, step_many(steps), strict=True):
        run = due[i][0]
        run.grad = None
        run.step += 1
        results[i] = msgspec.json.encode({"metrics": metrics})
    return results


def _adam(body: bytes) -> Adam:
    try:
        params = OptimStepRequest.model_validate_json(body).adam_params or AdamParams()
    except ValidationError as error:
        raise AdamError(f"not an optim_step request: {error}") from error
    return Adam(
        learning_rate=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
        grad_clip_norm=params.grad_clip_norm,
    )


def _step(run: RunState, adam: Adam) -> Step:
    grad = torch.zeros_like(run.adapter.flat) if run.grad is None else run.grad.flat
    return Step(adam, run.adapter.flat, run.m, run.v, grad, run.step)
