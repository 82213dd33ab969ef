"""`TrainingClient`: one training run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.curves import Curves
from weft.errors import APIResponseValidationError
from weft.future import APIFuture, Pending, background, future_twin, outlasting, state_of, twin
from weft.loss_handle import LossHandle, PerDatumLoss, trace
from weft.plan.estimate import CostEstimate
from weft.plan.plan import AnyDatum, Plan, PlannedStep
from weft.plan.planning import fetch_estimate, fetch_problems, of_run, plan_of
from weft.rest_client import RestClient
from weft.run_weights import RunWeights, base_model_of
from weft.runs.custom_loss import CustomLoss, require_torch, run_custom, upload_loss
from weft.runs.run import Run
from weft.runs.session import Session
from weft.tokenizer import fetch_tokenizer, load_tokenizer
from weft.wire.account.usage import UsageResponse
from weft.wire.checks.problem import Problem
from weft.wire.inputs import Datum
from weft.wire.losses import CustomLossInputRank
from weft.wire.training import (
    AdamParams,
    CreateModelRequest,
    DimuonParams,
    ForwardBackwardOutput,
    GetInfoResponse,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
)
from weft.wire.weights import LoadWeightsRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Output = APIFuture[ForwardBackwardOutput]


class TrainingClient(RunWeights, Pending["TrainingClient"]):
    """One training run. Usable at once; its operations wait until the server has made it.

    Every method returns a future at once and operations execute in the order they were called, so the usual step is

        backward = training.forward_backward(data, "cross_entropy")
        update = training.optim_step(AdamParams(learning_rate=1e-4))
        print(backward.result().metrics["loss:sum"])
        update.result()

    Losses are sums, never means: gradients add up over calls until `optim_step` uses and clears them.
    """

    def __init__(self, session: Session, request: Callable[..., CreateModelRequest | LoadWeightsRequest]) -> None:
        self._session = session
        self._run = Run(session)
        self._counting = threading.Lock()
        self._made = background().run(self._ready(request))
        self._curves = Curves(self._run, self._made)

    def __repr__(self) -> str:
        made, info = self._made, self._run.info
        if not made.done() or made.cancelled() or made.exception() or info is None:
            return f"TrainingClient({state_of(made)})"
        rank = f" at rank {info.lora_rank}" if info.lora_rank else ""
        return f"TrainingClient({info.model_id!r} on {base_model_of(info)!r}{rank})"

    async def _ready(self, request: Callable[..., CreateModelRequest | LoadWeightsRequest]) -> TrainingClient:
        await self._run.make(request)
        return self

    @property
    def model_id(self) -> str:
        """The run's id, under which its checkpoints and its usage are found; waits until the run is made."""
        return self.get_info().model_id

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Output:
        """Compute the loss and its outputs, without gradients."""
        given = _checked(data, loss_fn)
        return APIFuture.start(self._run.forward(given, loss_fn, dict(loss_fn_config or {})))

    forward_async = future_twin(forward)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Output:
        """Compute the loss and add its gradient to the run's. Losses: see the documentation of the service.

        The result holds, per datum, `logprobs` shaped as its target tokens, and metrics such as `loss:sum`.
        """
        given, config = _checked(data, loss_fn), dict(loss_fn_config or {})
        return self._counted(lambda told: self._run.forward_backward(given, loss_fn, config, told))

    forward_backward_async = future_twin(forward_backward)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLoss | LossHandle, *, loss_type_input: str | None = None
    ) -> Output:
        """Add the gradient of your own loss: `loss_fn(data, logprobs)` returns a torch scalar and metrics.

        `logprobs[i]` is a torch tensor shaped as the target tokens of `data[i]`. Needs torch, and two passes. A handle
        of `ServiceClient.create_custom_loss` takes one where the server runs it.
        """
        if loss_type_input not in (None, "logprobs"):
            raise ValueError(f"loss_type_input must be 'logprobs', got {loss_type_input!r}")
        given = _checked(data)
        if isinstance(loss_fn, LossHandle):
            loss_fn.check(given)
            if loss_fn.loss_id is not None:
                return self.forward_backward(given, "custom", {"loss_id": loss_fn.loss_id})
            loss_fn = loss_fn.run
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function or a handle of create_custom_loss, got {loss_fn!r:.80}")
        require_torch()
        mine = loss_fn
        return self._counted(lambda told: run_custom(self._run, given, mine, told))

    forward_backward_custom_async = future_twin(forward_backward_custom)

    def create_custom_loss(
        self, fn: PerDatumLoss, input_ranks: Mapping[str, CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """`ServiceClient.create_custom_loss`, of this run's session."""
        return APIFuture.start(upload_loss(self._session, trace(fn, input_ranks)))

    create_custom_loss_async = twin(create_custom_loss)

    def optim_step(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> APIFuture[OptimStepResponse]:
        """Apply the gradient that has added up, and clear it, with the parameters of the run's optimizer: AdamParams
        or DimuonParams. `adam_params` is another name of `optim_params`."""
        params = optim_params or adam_params
        if not isinstance(params, AdamParams | DimuonParams):
            name = "adam_params" if optim_params is None and adam_params is not None else "optim_params"
            raise TypeError(
                f"{name} must be AdamParams or DimuonParams, such as AdamParams(learning_rate=1e-4); got {params!r}"
            )

        def request(seq_id: int) -> OptimStepRequest:
            adam = params if isinstance(params, AdamParams) else None
            other = None if isinstance(params, AdamParams) else params.body()
            model_id = self._run.model_id
            return OptimStepRequest(
                model_id=model_id,
                adam_params=adam,
                optimizer_params=other,
                seq_id=seq_id,
                heard_of=self._run.heard_of if self._session.config.optim_step_heard_of else None,
            )

        with self._counting:
            self._counted_on = ()
            return APIFuture.start(self._run.step(request, OptimStepResponse))

    optim_step_async = future_twin(optim_step)

    def get_info(self) -> GetInfoResponse:
        """What the server says of the run; waits until it is made."""
        return APIFuture.start(self._get_info()).result()

    async def get_info_async(self) -> GetInfoResponse:
        """What the server says of the run; waits until it is made."""
        return await APIFuture.start(self._get_info())

    async def _get_info(self) -> GetInfoResponse:
        await outlasting(asyncio.wrap_future(self._made))
        if self._run.info is None:
            raise APIResponseValidationError("the run was made without its description")
        return self._run.info

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer, with the server's own files."""
        return load_tokenizer(APIFuture.start(self._fetch_tokenizer()).result())

    async def get_tokenizer_async(self) -> PreTrainedTokenizerBase:
        """`get_tokenizer`, awaited."""
        return load_tokenizer(await APIFuture.start(self._fetch_tokenizer()))

    async def _fetch_tokenizer(self) -> Path:
        return await fetch_tokenizer(self._session.transport, base_model_of(await self._get_info()))

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a point to each curve named in `metrics`, at `step` or one after the last. Returns at once."""
        self._curves.log(metrics, step)

    def create_rest_client(self) -> RestClient:
        """`ServiceClient.create_rest_client`, of this run's server and key."""
        return RestClient(transport=self._session.transport)

    def cost(self) -> APIFuture[UsageResponse]:
        """The usage of this run so far, in tokens and money."""
        return APIFuture.start(self._cost())

    cost_async = twin(cost)

    async def _cost(self) -> UsageResponse:
        return await self.create_rest_client().get_usage((await self._get_info()).model_id)

    def estimate_cost(self, plan: Plan | PlannedStep) -> APIFuture[CostEstimate]:
        """What `plan` will cost on this run, before it starts; `cost` says what was used."""
        return APIFuture.start(self._estimate(plan_of(plan)))

    estimate_cost_async = twin(estimate_cost)

    async def _estimate(self, plan: Plan) -> CostEstimate:
        plan, _ = of_run(plan, await self._get_info())
        return await fetch_estimate(self.create_rest_client(), plan)

    def validate(
        self,
        planned: Plan | PlannedStep | Sequence[AnyDatum],
        loss_fn: str | CustomLoss | LossHandle = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> list[Problem]:
        """Everything for which the server would refuse a plan, one step of it, or `data` with a loss; [] is good.

        Nothing is computed and nothing is billed.
        """
        return APIFuture.start(self._validate(planned, loss_fn, loss_fn_config)).result()

    async def validate_async(
        self,
        planned: Plan | PlannedStep | Sequence[AnyDatum],
        loss_fn: str | CustomLoss | LossHandle = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> list[Problem]:
        """`validate`, awaited."""
        return await APIFuture.start(self._validate(planned, loss_fn, loss_fn_config))

    async def _validate(
        self, planned: Plan | PlannedStep | Sequence[AnyDatum], loss_fn: Any = "cross_entropy", config: Any = None
    ) -> list[Problem]:
        info = await self._get_info()
        plan, problems = of_run(plan_of(planned, loss_fn, config), info)
        problems += await fetch_problems(self.create_rest_client(), plan, info.model_id)
        if isinstance(planned, Plan):
            return problems
        return [replace(problem, where=problem.where.removeprefix("steps[0].")) for problem in problems]


def _checked(data: Sequence[Datum], loss_fn: Any = "") -> list[Datum]:
    """The data as a list. `TypeError` or `ValueError` names an argument of another type."""
    if data is None or isinstance(data, Datum | Mapping | str):
        raise TypeError(f"data is a {type(data).__name__}; give a list of Datum")
    given = list(data)
    if not given:
        raise ValueError("data is empty; give at least one Datum")
    for index, datum in enumerate(given):
        if not isinstance(datum, Datum):
            raise TypeError(f"data[{index}] is a {type(datum).__name__}; give a Datum")
    if not isinstance(loss_fn, str):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}; give a name, or call forward_backward_custom")
    return given


def log(run: TrainingClient, metrics: Mapping[str, float], step: int | None = None) -> None:
    """Add a point to each of the run's curves named in `metrics`: `weft.log(run, {"reward": 0.4}, step=3)`.

    Without `step` it is the one after the last. Returns at once; the console draws the curves while the run goes on."""
    run.log(metrics, step)
