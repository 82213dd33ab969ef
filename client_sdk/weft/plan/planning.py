"""Pricing and checking a plan with what the server publishes: its limits, its prices, the names in use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.errors import WeftError
from weft.plan.estimate import CostEstimate, estimate
from weft.plan.plan import AnyDatum, Plan, PlannedSample, PlannedSave, PlannedStep, PlannedTrain, PlannedUpdate
from weft.plan.validate import validate
from weft.rest_client import RestClient
from weft.wire.checks.problem import Problem
from weft.wire.training import GetInfoResponse

_STEPS = (PlannedTrain, PlannedUpdate, PlannedSample, PlannedSave)


async def fetch_estimate(rest: RestClient, plan: Plan) -> CostEstimate:
    """Price `plan` at the rates that hold now."""
    if plan.base_model is None:
        raise WeftError("the plan names no base_model, on which prices depend")
    prices, limits = await asyncio.gather(rest.get_prices(plan.base_model), rest.get_limits())
    return estimate(plan, prices, limits)


async def fetch_problems(rest: RestClient, plan: Plan, run_id: str | None = None) -> list[Problem]:
    """All problems of `plan`, for the run `run_id` if it exists."""
    limits, names = await rest.get_limits(), list[str]()
    if run_id is not None and any(isinstance(step, PlannedSave) for step in plan.steps):
        names = [checkpoint.checkpoint_id for checkpoint in (await rest.list_checkpoints(run_id)).checkpoints]
    return validate(plan, limits, names)


def plan_of(
    planned: Plan | PlannedStep | Sequence[AnyDatum],
    loss_fn: Any = "cross_entropy",
    loss_fn_config: Mapping[str, float | str] | None = None,
) -> Plan:
    """A `Plan` from a plan, from one step, or from the data of one `forward_backward`."""
    if isinstance(planned, Plan):
        return planned
    if isinstance(planned, _STEPS):
        return Plan(steps=[planned])
    return Plan(steps=[PlannedTrain(planned, loss_fn, loss_fn_config)])


def of_run(plan: Plan, info: GetInfoResponse) -> tuple[Plan, list[Problem]]:
    """The plan for an existing run, which determines base model, rank and optimizer; and the problems of a plan that
    says otherwise."""
    config = info.optimizer_config
    optimizer = str(config.get("type", "adamw")) if isinstance(config, dict) else config.type
    base_model = info.model_data.model_name or info.model_name
    problems = []
    if plan.base_model not in (None, base_model):
        problems.append(Problem("base_model", "the run has another base model", base_model, plan.base_model))
    return replace(plan, base_model=base_model, rank=info.lora_rank or plan.rank, optimizer=optimizer), problems
