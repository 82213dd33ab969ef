"""`ServiceClient`: the entry point. It makes training runs, samplers and the REST client, all of one session."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Literal

from weft.errors import WeftError
from weft.future import EXIT_S, APIFuture, finish_before_exit, twin
from weft.loss_handle import LossHandle, PerDatumLoss, trace
from weft.plan.estimate import CostEstimate
from weft.plan.plan import Plan
from weft.plan.planning import fetch_estimate, fetch_problems
from weft.rest_client import RestClient
from weft.runs.custom_loss import upload_loss
from weft.runs.sampler import make_sampler
from weft.runs.session import Session
from weft.sampling_client import SamplingClient
from weft.training_client import TrainingClient
from weft.transport.http import Transport, resolve_endpoint
from weft.transport.retry import RetryPolicy
from weft.wire.checks.problem import Problem
from weft.wire.losses import CustomLossInputRank
from weft.wire.service import GetServerCapabilitiesResponse
from weft.wire.shown import arguments
from weft.wire.training import AdamOptimizerConfig, CreateModelRequest, LoraConfig, OptimizerConfig
from weft.wire.weights import LoadWeightsRequest


class ServiceClient:
    """A connection to a Weft server.

    Address and key come from the arguments, else from WEFT_BASE_URL and WEFT_API_KEY, else from TINKER_BASE_URL and
    TINKER_API_KEY. Nothing is sent until something is needed. `with ServiceClient() as service:` ends the session when
    the block ends; without it the session ends when its heartbeats stop.

    `priority` orders the work of one organisation: what is made here with "batch" lets "interactive" work go first.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        retry: RetryPolicy | None = None,
        priority: Literal["interactive", "batch"] = "interactive",
    ) -> None:
        endpoint = resolve_endpoint(base_url, api_key)
        headers = {"X-Weft-Priority": priority, **(default_headers_overrides or {})}
        self._transport = Transport(endpoint, retry or RetryPolicy(), headers)
        self._project_id = project_id or os.environ.get("WEFT_PROJECT_ID") or os.environ.get("TINKER_PROJECT_ID")
        self._session = Session(self._transport, user_metadata, self._project_id, display_name)

    def __repr__(self) -> str:
        return f"ServiceClient({self._transport.endpoint.base_url!r})"

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        name: str | None = None,
    ) -> TrainingClient:
        """A new run: a fresh LoRA adapter of this rank on `base_model`. The same seed gives the same start.

        `optimizer` is the family whose parameters `optim_step` takes: AdamW, or `DimuonOptimizerConfig()`. `name` is
        what lists call the run: `user_metadata["name"]`, by which Tinker's SDK names one too.
        """
        with arguments():
            lora = LoraConfig(
                rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn, train_unembed=train_unembed
            )
        request = partial(
            CreateModelRequest,
            base_model=base_model,
            lora_config=lora,
            user_metadata=named(user_metadata, name),
            optimizer_config=optimizer or AdamOptimizerConfig(),
        )
        return TrainingClient(self._session, request)

    create_lora_training_client_async = twin(create_lora_training_client)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        name: str | None = None,
    ) -> TrainingClient:
        """A new run that starts from a checkpoint's adapter, with a fresh optimizer. Its metadata name the checkpoint
        (`continued_from`)."""
        request = partial(
            LoadWeightsRequest,
            path=path,
            optimizer=False,
            base_model=base_model,
            user_metadata=named(user_metadata, name),
            optimizer_config=optimizer,
            weights_access_token=weights_access_token,
        )
        return TrainingClient(self._session, request)

    create_training_client_from_state_async = twin(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        name: str | None = None,
    ) -> TrainingClient:
        """A new run that continues exactly where a checkpoint was saved, optimizer included. Its metadata name the
        checkpoint (`continued_from`)."""
        request = partial(
            LoadWeightsRequest,
            path=path,
            optimizer=True,
            base_model=base_model,
            user_metadata=named(user_metadata, name),
            weights_access_token=weights_access_token,
        )
        return TrainingClient(self._session, request)

    create_training_client_from_state_with_optimizer_async = twin(create_training_client_from_state_with_optimizer)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryPolicy | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """A sampler of saved weights (`model_path`, `tinker://...`) or of a base model."""
        if model_path is None and base_model is None:
            raise ValueError("give model_path or base_model")
        return SamplingClient(
            self._session, make_sampler(self._session, model_path, base_model), retry_config, record_stability_info
        )

    create_sampling_client_async = twin(create_sampling_client)

    def create_custom_loss(
        self, fn: PerDatumLoss, input_ranks: Mapping[str, CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """Make a loss for `TrainingClient.forward_backward_custom`: run by the server if it can, else by this client.

        `fn(logprobs, ...)` takes the logprobs of one datum and the loss inputs that its other parameters name, and
        returns (loss, metrics): a scalar, and scalars named custom/<name>:sum or :mean. `input_ranks` are the ranks of
        all parameters: 0, 1 ([T]) or 2 ([T, K]). It may do only what torch.fx can trace: torch and math, no branches
        on values, no tensors from outside.
        """
        return APIFuture.start(upload_loss(self._session, trace(fn, input_ranks)))

    create_custom_loss_async = twin(create_custom_loss)

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Copy a checkpoint, ours or a published one, into this client's project; the copy's path. See
        `RestClient.copy_weights`."""
        rest = self.create_rest_client()
        return rest.copy_weights(
            path, self._project_id, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        )

    copy_weights_async = twin(copy_weights)

    def estimate(self, plan: Plan) -> APIFuture[CostEstimate]:
        """The cost of `plan`, before anything of it exists."""
        return APIFuture.start(fetch_estimate(self.create_rest_client(), plan))

    estimate_async = twin(estimate)

    def validate(self, plan: Plan) -> list[Problem]:
        """Everything for which the server would refuse `plan`; [] is good. Nothing is computed, nothing is billed."""
        return APIFuture.start(fetch_problems(self.create_rest_client(), plan)).result()

    async def validate_async(self, plan: Plan) -> list[Problem]:
        """`validate`, awaited."""
        return await APIFuture.start(fetch_problems(self.create_rest_client(), plan))

    def create_rest_client(self) -> RestClient:
        """A client for stored runs, checkpoints and their cost. It needs no session."""
        return RestClient(transport=self._transport)

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """The base models that the server serves."""
        return self.create_rest_client().get_server_capabilities().result()

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        """The base models that the server serves."""
        return await self.create_rest_client().get_server_capabilities()

    def close(
        self, status: Literal["success", "errored", "interrupted"] = "success", detail: str | None = None
    ) -> APIFuture[None]:
        """End the session: its runs and ephemeral samplers with it. Saved checkpoints stay.

        The end of the program waits for it, so it may be a script's last line.
        """
        closing = APIFuture.start(self._session.finish(status, detail))
        finish_before_exit(closing.future())
        return closing

    close_async = twin(close)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status, detail = _ending(error)
        closing = self.close(status, detail)
        try:
            closing.result(None if error is None else EXIT_S)
        except (WeftError, TimeoutError):
            if error is None:
                raise
            closing.cancel()  # the block's error is raised at once, without waiting for a server that may be away

    async def __aenter__(self) -> ServiceClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status, detail = _ending(error)
        closing = self.close(status, detail)
        try:
            await closing.result_async(None if error is None else EXIT_S)
        except (WeftError, TimeoutError):
            if error is None:
                raise
            closing.cancel()


def named(user_metadata: dict[str, str] | None, name: str | None) -> dict[str, str] | None:
    """The metadata of a run called `name`."""
    return user_metadata if name is None else {**(user_metadata or {}), "name": name}


def _ending(error: BaseException | None) -> tuple[Literal["success", "errored", "interrupted"], str | None]:
    """How a session ended, judged by the exception that left its `with` block."""
    if error is None:
        return "success", None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", None
    return "errored", f"{type(error).__name__}: {error}"[:500]
