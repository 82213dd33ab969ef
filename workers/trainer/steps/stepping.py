"""The optimizer steps of one stage, from encoded requests to encoded results."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from pydantic import ValidationError
from torch import Tensor
from weft.wire import DimuonParams, OptimStepRequest

from workers.trainer.runs.state import RunState
from workers.trainer.steps.adamw import Adam, OptimizerError, Step, step_many
from workers.trainer.steps.dimuon import Dimuon, DimuonStep, step_dimuon


def step_runs(due: Sequence[tuple[RunState, bytes]]) -> list[bytes | Exception]:
    """Update every run with its accumulated gradient (zero if there is none) by the OptimStepRequest in its body, and
    clear the gradient. Returns for each run the encoded result, or the error that left it unchanged.

    An error of the update itself is not caught: runs may be half updated, and only a rebuild by replay is safe."""
    results: list[bytes | Exception] = [b""] * len(due)
    asked: dict[int, Adam | Dimuon] = {}
    for i, (run, body) in enumerate(due):
        try:
            asked[i] = _params(run, body)
        except OptimizerError as error:
            results[i] = error
    zeros = _zeros([due[i][0] for i in asked])
    steps = {i: _step(due[i][0], params, zeros) for i, params in asked.items()}
    adams = {i: step for i, step in steps.items() if isinstance(step, Step)}
    dimuons = {i: step for i, step in steps.items() if isinstance(step, DimuonStep)}
    metrics = dict(zip(adams, step_many(list(adams.values())), strict=True))
    metrics |= dict(zip(dimuons, step_dimuon(list(dimuons.values())), strict=True))
    for i, found in metrics.items():
        run = due[i][0]
        run.stepped()
        results[i] = msgspec.json.encode({"metrics": found})
    return results


def _params(run: RunState, body: bytes) -> Adam | Dimuon:
    """The parameters of a step, checked to be for the run's own optimizer."""
    try:
        request = OptimStepRequest.model_validate_json(body)
        if run.spec.optimizer == "dimuon" and request.optimizer_params is not None:
            muon = DimuonParams.model_validate(request.optimizer_params)
            return Dimuon(muon.learning_rate, muon.beta1, muon.grad_clip_norm)
    except ValidationError as error:
        raise OptimizerError(f"not an optim_step request of {run.spec.optimizer}: {error}") from error
    params = request.adam_params
    if run.spec.optimizer != "adamw" or params is None:
        given = "adamw" if params is not None else (request.optimizer_params or {}).get("type")
        raise OptimizerError(f"this run's optimizer is {run.spec.optimizer}, the step is one of {given}")
    return Adam(
        learning_rate=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
        grad_clip_norm=params.grad_clip_norm,
    )


def _zeros(runs: Sequence[RunState]) -> Tensor:
    """The gradient of all that have accumulated none, in the memory of the largest of them, so that it is written once
    and stays in the cache."""
    unused = [run.own_grad.flat for run in runs if not run.has_grad]
    return max(unused, key=Tensor.numel).zero_() if unused else torch.empty(0)


def _step(run: RunState, params: Adam | Dimuon, zeros: Tensor) -> Step | DimuonStep:
    grad = run.due_grad(zeros)
    if isinstance(params, Dimuon):
        return DimuonStep(params, run.adapter.shape, run.adapter.flat, run.m, grad, run.step)
    return Step(params, run.adapter.flat, run.m, run.v, grad, run.step)
