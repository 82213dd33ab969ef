"""The optimizer steps of one stage of a pass, from encoded requests to encoded results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch
from pydantic import ValidationError
from torch import Tensor
from weft.wire import DimuonParams, OptimStepRequest
from weft.wire.checks.runs import LEAST_EPS

from scheduler.links.messages import TrainOp
from workers.model.memory import with_room
from workers.trainer.runs.state import RunState
from workers.trainer.steps.adamw import Adam, OptimizerError, Step, step_many
from workers.trainer.steps.dimuon import Dimuon, DimuonStep, step_dimuon


class Memory(Protocol):
    """The memory that holds the runs' states, of which some may be paged out."""

    def bring(self, *runs: RunState) -> None:
        """Return once all these runs are in memory. Raises OSError if there is no room for them now."""

    def make_room(self, *runs: RunState) -> None:
        """Free the memory of everything except these runs."""


def step_runs(due: Sequence[tuple[TrainOp, RunState, bytes]], memory: Memory) -> list[bytes | Exception]:
    """Update every run with its accumulated gradient (zeros if there is none) as the OptimStepRequest in its
    operation's body says, and clear the gradient. Returns for each run the encoded result, or the error that left it
    unchanged: OptimizerError, or OSError if there is no memory for its step now.

    Any other error of the update, HalfDone above all, is raised: runs may be half updated, and only a rebuild by replay
    is safe."""
    results: dict[int, bytes | Exception] = {}
    adams: dict[int, _Due] = {}
    dimuons: dict[int, _Due] = {}
    for i, (op, run, body) in enumerate(due):
        try:
            params = _params(op, run, body)
        except OptimizerError as error:
            results[i] = error
            continue
        (adams if isinstance(params, Adam) else dimuons)[i] = run, params, op.replay
    for group in (adams, *({i: each} for i, each in dimuons.items())):
        if group:
            results |= zip(group, _update(list(group.values()), memory), strict=True)
    return [results[i] for i in range(len(due))]


#: A run, the parameters of its step, and whether the step was answered before (a replay).
_Due = tuple[RunState, Adam | Dimuon, bool]


def _update(due: Sequence[_Due], memory: Memory) -> list[bytes | Exception]:
    """Update runs in one call or, if there is no memory for all of them, one half after the other; the bits are the
    same. A call changes all its runs or none, except those whose gradient it refuses."""
    runs = [run for run, _, _ in due]
    try:
        memory.bring(*runs)
        metrics = with_room(lambda: _call(due), lambda: memory.make_room(*runs))
    except OSError as error:
        if len(due) == 1:
            return [error]
    else:
        return [_stepped(run, found) for run, found in zip(runs, metrics, strict=True)]
    half = len(due) // 2
    return [*_update(due[:half], memory), *_update(due[half:], memory)]


def _stepped(run: RunState, found: dict[str, float] | OptimizerError) -> bytes | Exception:
    if isinstance(found, OptimizerError):
        return found
    run.stepped()
    return msgspec.json.encode({"metrics": found})


def _params(op: TrainOp, run: RunState, body: bytes) -> Adam | Dimuon:
    """The parameters of a step. Raises OptimizerError if they are not for the run's own optimizer."""
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
    if params.eps < LEAST_EPS and not op.replay:
        raise OptimizerError(f"adam_params.eps must be at least {LEAST_EPS:.3g}, got {params.eps}")
    return Adam(**dict(params))


def _zeros(runs: Sequence[RunState]) -> Tensor:
    """Zeros to be used as the gradient of every run that has accumulated none, as many as the largest of these needs.
    One shared tensor, so that it stays in the cache."""
    unused = [run.own_grad.flat for run in runs if not run.has_grad]
    return max(unused, key=Tensor.numel).zero_() if unused else torch.empty(0)


def _call(due: Sequence[_Due]) -> Sequence[dict[str, float] | OptimizerError]:
    """The metrics, or errors, of several steps of AdamW, or the metrics of one of Dimuon."""
    adams, zeros = [], _zeros([run for run, _, _ in due])
    for run, params, answered in due:
        weights, grad = run.adapter, run.due_grad(zeros)
        if isinstance(params, Dimuon):
            return [step_dimuon(DimuonStep(params, weights.shape, weights.flat, run.m, grad, run.step))]
        adams.append(Step(params, weights.flat, run.m, run.v, grad, run.step, answered))
    return step_many(adams)
