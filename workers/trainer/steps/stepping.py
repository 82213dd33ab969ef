"""The optimizer steps of one stage, from encoded requests to encoded results."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pydantic import ValidationError
from weft.wire import DimuonParams, OptimStepRequest

from workers.trainer.runs.state import RunState
from workers.trainer.steps.adamw import Adam, OptimizerError, Step, step_many
from workers.trainer.steps.dimuon import Dimuon, DimuonStep, step_dimuon


def step_runs(due: Sequence[tuple[RunState, bytes]]) -> list[bytes | Exception]:
    """Update every run with its accumulated gradient (zero if there is none) by the OptimStepRequest in its body, and
    clear the gradient. Returns for each run the encoded result, or the error that left it unchanged.

    An error of the update itself is not caught: runs may be half updated, and only a rebuild by replay is safe."""
    results: list[bytes | Exception] = []
    adams: dict[int, Step] = {}
    dimuons: dict[int, DimuonStep] = {}
    for i, (run, body) in enumerate(due):
        try:
            step = _step(run, _params(run, body))
        except OptimizerError as error:
            results.append(error)
            continue
        results.append(b"")
        if isinstance(step, Step):
            adams[i] = step
        else:
            dimuons[i] = step
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


def _step(run: RunState, params: Adam | Dimuon) -> Step | DimuonStep:
    grad = run.due_grad()
    if isinstance(params, Dimuon):
        return DimuonStep(params, run.adapter.shape, run.adapter.flat, run.m, grad, run.step)
    return Step(params, run.adapter.flat, run.m, run.v, grad, run.step)
