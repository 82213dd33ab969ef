"""Everything that is wrong with a plan, found before anything is spent: pure checks against the server's limits.

The rules are the server's own (`weft.wire.checks`). It raises the first problem; here all are listed: where, what, and
the limit and the value if there are any. Nothing is sent and nothing is computed, so a plan without problems can still
diverge; it will just not be refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np

from weft.errors import WeftError
from weft.loss_handle import LossHandle
from weft.plan.plan import Plan, PlannedSample, PlannedSave, PlannedTrain, PlannedUpdate, datum_of
from weft.runs.chunks import split
from weft.runs.custom_loss import forward_datum
from weft.wire.account.limits import LimitsResponse, ModelLimits
from weft.wire.binary.request_codec import as_decoded, estimate_bytes
from weft.wire.binary.train_codec import TrainBatch
from weft.wire.checks.batches import BatchRules, batch_problems, size_problems
from weft.wire.checks.losses import CUSTOM, WITH_CUSTOM
from weft.wire.checks.problem import Problem, build
from weft.wire.checks.runs import (
    ADAMW,
    DIMUON,
    adam_problems,
    name_problems,
    optimizer_problems,
    shape_problems,
    step_problems,
    ttl_problems,
)
from weft.wire.checks.samples import count_problems, params_problems, prompt_problems, top_problems
from weft.wire.error import WireError
from weft.wire.inputs import AnyPrompt, Datum, ModelInput
from weft.wire.sampling import SamplingParams
from weft.wire.training import AdamParams, DimuonParams

#: A learning rate from here on ruins any adapter, whatever the optimizer.
LARGEST_LEARNING_RATE = 1.0


def validate(plan: Plan, limits: LimitsResponse, names_in_use: Collection[str] = ()) -> list[Problem]:
    """All problems of `plan`, in the order of its fields; none: it will not be refused.

    `names_in_use` are the checkpoints that the run has, as `<kind>/<name>`.
    """
    problems = [*_run(plan, limits)]
    saved = set(names_in_use)
    for index, step in enumerate(plan.steps):
        if isinstance(step, PlannedTrain):
            found = _train(step, plan, limits)
        elif isinstance(step, PlannedSample):
            found = _sample(step, plan, limits)
        elif isinstance(step, PlannedUpdate):
            found = (problem.within("params") for problem in _update(step, plan.optimizer))
        elif isinstance(step, PlannedSave):
            found = _save(step, saved, limits, plan.times)
        else:
            found = iter([Problem("", f"not a step of a plan but {type(step).__name__}")])
        problems += (problem.within(f"steps[{index}]") for problem in found)
    return problems


def _run(plan: Plan, limits: LimitsResponse) -> Iterator[Problem]:
    if plan.base_model not in limits.models:
        served = ", ".join(sorted(limits.models))
        yield Problem("base_model", "the server has no such base model", served, plan.base_model)
    yield from optimizer_problems(plan.optimizer, limits.optimizers)
    yield from shape_problems(plan.rank, plan.seed, limits.max_rank)
    if not (plan.train_mlp or plan.train_attn or plan.train_unembed):
        yield Problem("train_mlp", "nothing would be trained: one of train_mlp, train_attn and train_unembed must be")
    if plan.times < 1:
        yield Problem("times", "the loop would not run", 1, plan.times)
    if not plan.steps:
        yield Problem("steps", "the plan has no steps")


def _train(step: PlannedTrain, plan: Plan, limits: LimitsResponse) -> Iterator[Problem]:
    """Problems of a pass over data, in the order of the data."""
    model = limits.models.get(plan.base_model or "")
    reads = step.loss_fn.reads if isinstance(step.loss_fn, LossHandle) else None
    losses = {CUSTOM: WITH_CUSTOM[CUSTOM], **limits.losses}
    batch = TrainBatch("", 1, *_loss(step))
    readable: dict[int, Datum] = {}
    found: list[tuple[int, Problem]] = []
    for index, given in enumerate(step.data):
        try:
            datum = datum_of(given)
            batch.data.append(as_decoded(forward_datum(datum) if callable(step.loss_fn) else datum))
            readable[index] = datum
        except (ValueError, KeyError, TypeError, WeftError) as error:
            found.append((index, Problem("", " ".join(str(error).split()))))
    indices = list(readable)
    for at, problem in batch_problems(batch, BatchRules(losses, model, plan.base_model or "this model", reads)):
        if at is not None:
            found.append((indices[at], problem))
        elif problem.where != "data" or not step.data:
            yield problem
    for index, size in zip(indices, estimate_bytes([*readable.values()]), strict=True):
        if limits.max_body_bytes is not None and size > limits.max_body_bytes:
            found.append((index, Problem("", "too many bytes for one request", limits.max_body_bytes, size)))
    for index, problem in sorted(found, key=lambda pair: pair[0]):
        yield problem.within(f"data[{index}]")
    for part in split([*readable.values()], limits.chunk_data, limits.chunk_bytes):
        yield from size_problems([datum.model_input.length for datum in part], limits)


def _loss(step: PlannedTrain) -> tuple[str, dict[str, float | str]]:
    """The loss as the server sees it: one that only the client can compute begins with a plain forward pass."""
    config = dict(step.loss_fn_config or {})
    if isinstance(step.loss_fn, LossHandle):
        return CUSTOM, {"loss_id": step.loss_fn.loss_id or "", **config}
    return (step.loss_fn, config) if isinstance(step.loss_fn, str) else ("cross_entropy", config)


def _sample(step: PlannedSample, plan: Plan, limits: LimitsResponse) -> Iterator[Problem]:
    model = limits.models.get(plan.base_model or "")
    params: SamplingParams | None
    if isinstance(step.sampling_params, Mapping):
        params = yield from build(SamplingParams, step.sampling_params, "sampling_params")
    else:
        params = step.sampling_params
    if params is not None:
        yield from params_problems(params, model, limits)
    yield from count_problems(step.num_samples, limits)
    yield from top_problems("topk_prompt_logprobs", step.topk_prompt_logprobs, limits)
    yield from top_problems("topk_sample_logprobs", step.topk_sample_logprobs, limits)
    if not step.prompts:
        yield Problem("prompts", "no prompts")
    for index, prompt in enumerate(step.prompts):
        for problem in _prompt(prompt, params, model, plan.base_model or "this model"):
            yield replace(problem, where=f"prompts[{index}]")


def _prompt(
    prompt: AnyPrompt, params: SamplingParams | None, model: ModelLimits | None, name: str
) -> Iterator[Problem]:
    try:
        ids = prompt.to_ints() if isinstance(prompt, ModelInput) else list(prompt)
        tokens = np.asarray(ids, dtype=np.int64)
    except (WireError, ValueError, TypeError, OverflowError) as error:
        yield Problem("", f"not token ids: {error}")
        return
    yield from prompt_problems(tokens, model, name)
    if model is None or params is None or params.max_tokens is None or tokens.size > model.context_length:
        return
    room = model.context_length - tokens.size + 1  # the last drawn token takes no position: nothing is computed from it
    if params.max_tokens > room:
        what = f"max_tokens do not fit behind {tokens.size} tokens of prompt; sequences would end early"
        yield Problem("", what, room, params.max_tokens)


def _update(step: PlannedUpdate, optimizer: str) -> Iterator[Problem]:
    params: AdamParams | DimuonParams | None
    if not isinstance(step.params, Mapping):
        params = step.params
    elif optimizer == DIMUON:
        params = yield from build(DimuonParams, step.params, "")
    else:
        params = yield from build(AdamParams, step.params, "")
    if params is None:
        return
    yield from step_problems(DIMUON if isinstance(params, DimuonParams) else ADAMW, optimizer)
    if params.learning_rate > LARGEST_LEARNING_RATE:
        yield Problem("learning_rate", "out of range", f"0 to {LARGEST_LEARNING_RATE:g}", params.learning_rate)
    if isinstance(params, AdamParams):
        yield from adam_problems(params)


def _save(step: PlannedSave, saved: set[str], limits: LimitsResponse, times: int) -> Iterator[Problem]:
    """`saved` are the names in use when this step comes; the name of this save is added."""
    yield from name_problems(step.name)
    full, replaces = f"{step.kind}/{step.name}", step.overwrite and step.kind == "weights"
    if full in saved and not replaces:
        yield Problem("name", "this name is in use: take another, or delete that checkpoint", None, full)
    elif times > 1 and not replaces:
        yield Problem("name", f"saved {times} times under one name", 1, full)
    saved.add(full)
    yield from ttl_problems(step.ttl_seconds, limits.min_ttl_seconds, limits.max_ttl_seconds)
