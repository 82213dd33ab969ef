"""The optimizer of a run, chosen when it is created, and the check of its steps before they are accepted."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from weft.wire import DimuonOptimizerConfig, DimuonParams, OptimStepRequest
from weft.wire.checks.runs import ADAMW, DIMUON, adam_problems, optimizer_problems, rate_problems, step_problems

from api.errors import Invalid, Malformed, explain, quote, refuse

M = TypeVar("M", DimuonOptimizerConfig, DimuonParams)

#: By the optimizer's name: the text that clients read about the optimizer of a run.
CONFIGS: dict[str, dict[str, Any]] = {ADAMW: {"type": ADAMW}, DIMUON: {"type": DIMUON, "version": 1}}


def family_of(config: Any, field: str) -> str | None:
    """The name of the optimizer that `config` (a type of weft.wire, or JSON) asks for; None if there is none.

    Raises Invalid for one that this server does not have."""
    if config is None:
        return None
    family = config.get("type") if isinstance(config, dict) else getattr(config, "type", None)
    refuse(optimizer_problems(family, CONFIGS), field)
    given = config if isinstance(config, dict) else config.model_dump()
    if family == DIMUON:
        _parsed(DimuonOptimizerConfig, given, field)
    elif given != CONFIGS[str(family)]:
        raise Invalid(f"{field}: adamw has no settings here, its parameters come with each step; got {quote(given)}")
    return str(family)


def check_step(request: OptimStepRequest, optimizer: str) -> dict[str, float]:
    """Check that a step is for the run's own optimizer. Returns the settings that the optimizer gets, with defaults."""
    if request.adam_params is not None:
        refuse(step_problems(ADAMW, optimizer), "adam_params")
        refuse(problem.within("adam_params") for problem in adam_problems(request.adam_params))
        return request.adam_params.model_dump()
    given = request.optimizer_params or {}
    refuse(optimizer_problems(given.get("type"), CONFIGS), "optimizer_params")
    if given["type"] == ADAMW:
        raise Invalid("optimizer_params: AdamW takes its parameters under the name adam_params")
    refuse(step_problems(given["type"], optimizer), "optimizer_params")
    params = _parsed(DimuonParams, given, "optimizer_params")
    problems = rate_problems("learning_rate", params.learning_rate)
    refuse(problem.within("optimizer_params") for problem in problems)
    return params.model_dump(exclude={"type"})


def check_same_optimizer(saved: str, used: str) -> None:
    """Refuse to load a state saved with another optimizer, which would mean nothing to this one."""
    if saved != used:
        raise Invalid(f"optimizer: that checkpoint holds the state of {saved}, the model uses {used}; load it without")


def _parsed(model: type[M], given: dict[str, Any], field: str) -> M:
    try:
        return model.model_validate(given, strict=True)
    except ValidationError as error:
        raise Malformed(f"{field}: {explain(error)}") from None
