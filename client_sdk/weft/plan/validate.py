"""Everything that is wrong with a plan, found before anything is spent: pure checks against the server's limits.

All problems are reported, not the first: where, what, and the limit and the value if there are any. Nothing is sent and
nothing is computed, so a plan without problems can still diverge; it will just not be refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from weft.plan.data import data_problems
from weft.plan.plan import Plan, PlannedSample, PlannedSave, PlannedTrain, PlannedUpdate
from weft.plan.problem import Problem, build
from weft.plan.sample import sample_problems
from weft.wire.limits import LimitsResponse
from weft.wire.training import AdamParams, DimuonParams

#: A step this long takes any adapter apart, whatever the optimizer.
LARGEST_LEARNING_RATE = 1.0
MAX_SEED = 2**63 - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def validate(plan: Plan, limits: LimitsResponse, names_in_use: Collection[str] = ()) -> list[Problem]:
    """All problems of `plan`, in the order of its fields; none: it will not be refused.

    `names_in_use` are the checkpoints that the run has, as `<kind>/<name>`.
    """
    problems = [*_run(plan, limits)]
    saved = set(names_in_use)
    model = limits.models.get(plan.base_model or "")
    for index, step in enumerate(plan.steps):
        where = f"steps[{index}]"
        if isinstance(step, PlannedTrain):
            problems += data_problems(step, model, limits, where)
        elif isinstance(step, PlannedSample):
            problems += sample_problems(step, model, limits, where)
        elif isinstance(step, PlannedUpdate):
            problems += _update(step, plan.optimizer, where)
        elif isinstance(step, PlannedSave):
            problems += _save(step, saved, limits, plan.times, where)
        else:
            problems.append(Problem(where, f"not a step of a plan but {type(step).__name__}"))
    return problems


def _run(plan: Plan, limits: LimitsResponse) -> Iterator[Problem]:
    if plan.base_model not in limits.models:
        served = ", ".join(sorted(limits.models))
        yield Problem("base_model", "the server has no such base model", served, plan.base_model)
    if plan.optimizer not in limits.optimizers:
        yield Problem("optimizer", "the server has no such optimizer", ", ".join(limits.optimizers), plan.optimizer)
    most = limits.max_rank
    if plan.rank < 1 or (most is not None and plan.rank > most):
        yield Problem("rank", "outside of what the server allows", f"1 to {most}", plan.rank)
    if plan.seed is not None and not 0 <= plan.seed <= MAX_SEED:
        yield Problem("seed", "out of range", f"0 to {MAX_SEED}", plan.seed)
    if not (plan.train_mlp or plan.train_attn or plan.train_unembed):
        yield Problem("train_mlp", "nothing would be trained: one of train_mlp, train_attn and train_unembed must be")
    if plan.times < 1:
        yield Problem("times", "the loop would not run", 1, plan.times)
    if not plan.steps:
        yield Problem("steps", "the plan has no steps")


def _update(step: PlannedUpdate, optimizer: str, where: str) -> Iterator[Problem]:
    where = f"{where}.params"
    given = step.params
    params: AdamParams | DimuonParams | None
    if not isinstance(given, Mapping):
        params = given
    elif optimizer == "dimuon":
        params = yield from build(DimuonParams, given, where)
    else:
        params = yield from build(AdamParams, given, where)
    if params is None:
        return
    if isinstance(params, DimuonParams) != (optimizer == "dimuon"):
        yield Problem(where, f"{type(params).__name__} are not those of the run's optimizer", optimizer)
    if params.learning_rate > LARGEST_LEARNING_RATE:
        limit = f"0 to {LARGEST_LEARNING_RATE:g}"
        yield Problem(f"{where}.learning_rate", "out of range", limit, params.learning_rate)
    if isinstance(params, AdamParams) and params.eps == 0:
        yield Problem(f"{where}.eps", "a weight without a gradient would become 0 / 0", "above 0", params.eps)


def _save(step: PlannedSave, saved: set[str], limits: LimitsResponse, times: int, where: str) -> Iterator[Problem]:
    """`saved` are the names in use when this step comes, and gets the new one."""
    if not _NAME.fullmatch(step.name):
        rule = "letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 200"
        yield Problem(f"{where}.name", "not a name", rule, step.name)
    full, replaces = f"{step.kind}/{step.name}", step.overwrite and step.kind == "weights"
    if full in saved and not replaces:
        yield Problem(f"{where}.name", "this name is in use: take another, or delete that checkpoint", None, full)
    elif times > 1 and not replaces:
        yield Problem(f"{where}.name", f"saved {times} times under one name", 1, full)
    saved.add(full)
    least, most = limits.min_ttl_seconds, limits.max_ttl_seconds
    ttl = step.ttl_seconds
    if ttl is not None and ((least is not None and ttl < least) or (most is not None and ttl > most)):
        yield Problem(f"{where}.ttl_seconds", "out of range", f"{least} to {most}", ttl)
