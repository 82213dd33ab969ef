"""The half of a `TrainingClient` that saves and loads weights, and samples from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel

from weft.errors import APIResponseValidationError
from weft.future import APIFuture, future_twin, twin
from weft.runs.run import Run
from weft.runs.sampler import Sampler, make_sampler
from weft.runs.session import Session
from weft.sampling_client import SamplingClient
from weft.transport.retry import RetryPolicy
from weft.wire.base import Request
from weft.wire.shown import arguments
from weft.wire.training import GetInfoResponse
from weft.wire.weights import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SamplingClientKind,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


def base_model_of(info: GetInfoResponse) -> str:
    """The served name of a run's base model."""
    name = info.model_data.model_name or info.model_name
    if name is None:
        raise APIResponseValidationError(f"the server does not say what base model run {info.model_id} has")
    return name


class RunWeights:
    """Saving and loading, in the order of the run's other operations. Names are letters, digits, `.`, `_` and `-`."""

    _session: Session
    _run: Run
    _counting: threading.Lock  # threads may call at the same moment
    # futures that the next step depends on, and whose outcome the caller does not know yet
    _counted_on: Sequence[APIFuture[Any]] = ()

    def _counted(self, work: Callable[[bool], Coroutine[Any, Any, T]]) -> APIFuture[T]:
        """Start an operation that the next step depends on. The operation is told whether the caller knows how all such
        operations before it ended."""
        with self._counting:
            unknown = [other for other in self._counted_on if not other.known]
            future = APIFuture.start(work(not unknown))
            self._counted_on = [*unknown, future]
        return future

    def _operate(self, route: str, request: Request, answer: type[M]) -> APIFuture[M]:
        """Submit `request`, which the caller has validated; its run id and number are filled in when its turn comes."""
        return APIFuture.start(self._run.operate(route, partial(self._numbered, request), answer))

    def _numbered(self, request: Request, seq_id: int) -> Request:
        return request.model_copy(update={"model_id": self._run.model_id, "seq_id": seq_id})

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save adapter and optimizer, to continue from; the result's `path` is `tinker://<run>/weights/<name>`.

        `ttl_seconds` (an hour to ten years) deletes it after that time; None keeps it.
        """
        with arguments(path="name"):
            request = SaveWeightsRequest(
                model_id="", path=name, ttl_seconds=ttl_seconds, overwrite=overwrite, user_metadata=user_metadata
            )
        return self._operate("/save_weights", request, SaveWeightsResponse)

    save_state_async = future_twin(save_state)

    def load_state(self, path: str, weights_access_token: str | None = None) -> APIFuture[LoadWeightsResponse]:
        """Load a checkpoint's adapter into this run, with a fresh optimizer."""
        return self._load(path, weights_access_token, optimizer=False)

    load_state_async = future_twin(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load a checkpoint's adapter and optimizer into this run."""
        return self._load(path, weights_access_token, optimizer=True)

    load_state_with_optimizer_async = future_twin(load_state_with_optimizer)

    def _load(self, path: str, token: str | None, optimizer: bool) -> APIFuture[LoadWeightsResponse]:
        with arguments():
            request = LoadWeightsRequest(model_id="", path=path, optimizer=optimizer, weights_access_token=token)
        numbered = partial(self._numbered, request)
        return self._counted(lambda told: self._run.operate("/load_weights", numbered, LoadWeightsResponse, told))

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Save the adapter for sampling; the result's `path` is `tinker://<run>/sampler_weights/<name>`."""
        with arguments(path="name"):
            request = SaveWeightsForSamplerRequest(
                model_id="", path=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata
            )
        return self._operate("/save_weights_for_sampler", request, SaveWeightsForSamplerResponse)

    save_weights_for_sampler_async = future_twin(save_weights_for_sampler)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Export the adapter as PEFT files; `RestClient.get_external_weights_urls` says where to fetch them."""
        with arguments(path="name"):
            request = SaveWeightsExternalRequest(
                model_id="", path=name, ttl_seconds=ttl_seconds, age_encryption_recipients=age_encryption_recipients
            )
        return self._operate("/save_weights_external", request, SaveWeightsExternalResponse)

    save_weights_external_async = future_twin(save_weights_external)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryPolicy | None = None,
        record_stability_info: bool = False,
        kind: SamplingClientKind = "snapshot",
    ) -> SamplingClient:
        """A sampler of the weights as they are when this operation's turn comes.

        A "snapshot" keeps these weights; an "inflight" sampler follows the run as later saves update it. `name` is
        ignored: the weights are kept for as long as the session. `record_stability_info` keeps what the loss
        stable_reinforce needs.
        """
        return SamplingClient(self._session, self._save_ephemeral(kind), retry_config, record_stability_info)

    save_weights_and_get_sampling_client_async = twin(save_weights_and_get_sampling_client)

    async def _save_ephemeral(self, kind: SamplingClientKind) -> Sampler:
        def request(seq_id: int) -> SaveWeightsForSamplerRequest:
            number = next(self._session.sampler_numbers)
            return SaveWeightsForSamplerRequest(
                model_id=self._run.model_id, sampling_session_seq_id=number, kind=kind, seq_id=seq_id
            )

        saved = await self._run.operate("/save_weights_for_sampler", request, SaveWeightsForSamplerResponseInternal)
        if saved.sampling_session_id is None:
            raise APIResponseValidationError("the server saved the weights but names no sampler")
        return Sampler(saved.sampling_session_id, base_model_of(self._run.info) if self._run.info else None)

    def create_sampling_client(
        self, model_path: str, retry_config: RetryPolicy | None = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A sampler of saved weights, `tinker://<run>/sampler_weights/<name>`."""
        return SamplingClient(
            self._session, make_sampler(self._session, model_path, None), retry_config, record_stability_info
        )

    create_sampling_client_async = twin(create_sampling_client)
