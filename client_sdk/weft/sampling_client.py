"""`SamplingClient`: draw tokens from a base model or from a run's weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import httpx

from weft.errors import APIResponseValidationError, GoneError, WeftError
from weft.future import APIFuture, Pending, background, cancelling_twin, outlasting, state_of
from weft.rest_client import RestClient
from weft.runs.drawing import Drawing, SampleFuture
from weft.runs.sampler import Sampler, SamplerHandle, join_sampler
from weft.runs.session import JoinedSession, Session
from weft.tokenizer import fetch_tokenizer, load_tokenizer
from weft.transport.completions import CompletionPoll
from weft.transport.http import Call, Endpoint, Transport, encode, parse, resolve_endpoint
from weft.transport.poll import fetch_result
from weft.transport.retry import RetryPolicy
from weft.wire.binary.sample_codec import decode_sample_response
from weft.wire.inputs import AnyPrompt, prompt_of
from weft.wire.sampling import (
    GetSamplerResponse,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)
from weft.wire.service import CancelFutureRequest, UntypedAPIFuture
from weft.wire.shown import arguments
from weft.wire.tensor import TensorData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: How often a sample whose result the server has lost is drawn again.
MAX_REDRAWS = 5


class SamplingClient(Pending["SamplingClient"]):
    """A sampler of one session. Usable at once; requests wait until the server has made it.

    A snapshot sampler's weights never change; an inflight one follows its run. Requests are independent: they may run
    in any order and as many together as the server has room for. It can be pickled, with its API key, for other
    processes; `get_sampler_handle` does the same without a credential.
    """

    def __init__(
        self,
        session: Session,
        made: Coroutine[Any, Any, Sampler],
        policy: RetryPolicy | None = None,
        record_stability_info: bool = False,
    ) -> None:
        self._session = session
        self._policy = policy
        self._record = record_stability_info
        self._numbers = itertools.count()
        self._completions: CompletionPoll | None = None
        self._sampler = background().run(made)
        self._made = background().run(self._ready())

    def __repr__(self) -> str:
        if not self._sampler.done() or self._sampler.cancelled() or self._sampler.exception():
            return f"SamplingClient({state_of(self._sampler)})"
        sampler = self._sampler.result()
        return f"SamplingClient({sampler.id!r}{f' of {sampler.base_model!r}' if sampler.base_model else ''})"

    async def _ready(self) -> SamplingClient:
        await self._get_sampler()
        return self

    async def _get_sampler(self) -> Sampler:
        return await outlasting(asyncio.wrap_future(self._sampler))

    def get_sampler_handle(self) -> str:
        """A string from which any process makes a client of this sampler, with its own credentials."""
        return APIFuture.start(self._handle()).result().encoded()

    async def get_sampler_handle_async(self) -> str:
        """`get_sampler_handle`, awaited."""
        return (await APIFuture.start(self._handle())).encoded()

    async def _handle(self) -> SamplerHandle:
        sampler = await self._get_sampler()
        return SamplerHandle(
            base_url=self._session.transport.endpoint.base_url,
            session_id=await self._session.id(),
            sampler_id=sampler.id,
            base_model=sampler.base_model,
            record_stability_info=self._record,
        )

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """A client of the sampler behind `handle`, whose server gets this process's API key: mind where it is from."""
        found = SamplerHandle.decoded(handle)
        return _client_of(found, resolve_endpoint(found.base_url, api_key), None, RetryPolicy(), ())

    def __reduce__(self) -> tuple[Any, ...]:
        handle = APIFuture.start(self._handle()).result()
        transport = self._session.transport
        return _client_of, (handle, transport.endpoint, self._policy, transport.policy, (*transport.headers.items(),))

    @property
    def sampling_session_id(self) -> str:
        """The sampler's id; waits until the sampler is made."""
        return APIFuture(self._sampler).result().id

    def sample(
        self,
        prompt: AnyPrompt,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        max_staleness: int | None = None,
        return_routed_experts: bool = False,
        stream: bool = False,
        priority: Literal["interactive", "batch"] | None = None,
    ) -> SampleFuture:
        """Draw `num_samples` sequences that continue `prompt`, a `ModelInput` or token ids, with the logprob of every
        token drawn.

        `include_prompt_logprobs` also gives the prompt's own logprobs, of which `prompt_logprobs_last_n` keeps the
        last n. With `max_staleness` the server ends a sequence (`stale`, with the tokens it has) once the run is more
        optimizer steps ahead of its oldest token than that. `return_routed_experts` tells which experts its tokens
        were sent to, for training to send them there again (`SampledSequence.routed_experts_np`). With `stream` the
        future can be iterated for the tokens while they are drawn. `priority` "batch" lets the organisation's other
        work go first; None is the client's own. `future.stop()` ends the drawing and returns what there is; cancelling
        the future ends it too, for nobody. Raises `RequestFailedError` if the request cannot be done.
        """
        with arguments(prompt_logprobs="include_prompt_logprobs"):
            request = SampleRequest(
                prompt=prompt_of(prompt, "prompt"),
                sampling_params=sampling_params,
                num_samples=num_samples,
                prompt_logprobs=include_prompt_logprobs,
                topk_prompt_logprobs=topk_prompt_logprobs,
                topk_sample_logprobs=topk_sample_logprobs,
                target_prompt_logprobs=target_prompt_logprobs,
                prompt_alt_tokens_k=prompt_alt_tokens_k,
                prompt_logprobs_last_n=prompt_logprobs_last_n,
                max_staleness=max_staleness,
                return_routed_experts=return_routed_experts or None,
                stream=stream or None,
                record_stability_info=True if self._record else None,
            )
        return SampleFuture.begin(lambda drawing: self._sample(request, drawing, priority))

    sample_async = cancelling_twin(sample)

    def compute_logprobs(
        self, prompt: AnyPrompt, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The logprob of every token of `prompt` given those before it; None for the first."""
        with arguments():
            request = SampleRequest(
                prompt=prompt_of(prompt, "prompt"),
                sampling_params=SamplingParams(max_tokens=0),
                prompt_logprobs=True,
                prompt_logprobs_last_n=prompt_logprobs_last_n,
            )
        return APIFuture.start(self._logprobs(request))

    compute_logprobs_async = cancelling_twin(compute_logprobs)

    def create_rest_client(self) -> RestClient:
        """A client for records and checkpoints, on this client's connection."""
        return RestClient(transport=self._session.transport)

    def get_base_model(self) -> str:
        """The name of the base model."""
        return APIFuture.start(self._get_base_model()).result()

    async def get_base_model_async(self) -> str:
        """The name of the base model."""
        return await APIFuture.start(self._get_base_model())

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer, with the server's own files."""
        return load_tokenizer(APIFuture.start(self._fetch_tokenizer()).result())

    async def get_tokenizer_async(self) -> PreTrainedTokenizerBase:
        """`get_tokenizer`, awaited."""
        return load_tokenizer(await APIFuture.start(self._fetch_tokenizer()))

    async def _fetch_tokenizer(self) -> Path:
        return await fetch_tokenizer(self._session.transport, await self._get_base_model())

    async def _get_base_model(self) -> str:
        sampler = await self._get_sampler()
        if sampler.base_model is not None:
            return sampler.base_model
        return (await self._session.transport.ask("GET", f"/samplers/{sampler.id}", GetSamplerResponse)).base_model

    async def _logprobs(self, request: SampleRequest) -> list[float | None]:
        logprobs = (await self._sample(request)).prompt_logprobs
        if logprobs is None:
            raise APIResponseValidationError("the server returned no prompt logprobs")
        return logprobs

    async def _sample(
        self, request: SampleRequest, drawing: Drawing | None = None, priority: str | None = None
    ) -> SampleResponse:
        sampler = await self._get_sampler()
        one_poll = self._session.config.sample_use_retrieve_futures
        if one_poll and self._completions is None:
            self._completions = CompletionPoll(self._session.transport, sampler.id, sampler.clone)
        async with contextlib.nullcontext() if one_poll else self._session.sample_slots:
            for _ in range(MAX_REDRAWS):
                seq_id = sampler.seq_of(next(self._numbers))
                try:
                    numbered = request.model_copy(update={"sampling_session_id": sampler.id, "seq_id": seq_id})
                    return await self._draw(numbered, drawing, priority)
                except GoneError as error:
                    if drawing is not None and drawing.told and request.sampling_params.seed is None:
                        raise  # another draw would give other tokens than those already read
                    lost = error
            raise lost

    async def _draw(self, request: SampleRequest, drawing: Drawing | None, priority: str | None) -> SampleResponse:
        headers = {"X-Tinker-Sampling-Backpressure": "1"} | ({"X-Weft-Priority": priority} if priority else {})
        transport = self._session.transport
        call = Call("POST", "/asample", encode(request.body()), headers=headers, patient=True)
        future = await self._accepted(call)
        if drawing is not None:
            drawing.accepted(transport, future.request_id, stream=bool(request.stream))

        def read(answer: httpx.Response) -> SampleResponse:
            result = decode_sample_response(answer.content)
            names = future.sample_sequence_ids
            if names is not None and len(names) != len(result.sequences):
                raise APIResponseValidationError(f"{len(names)} sequences promised, {len(result.sequences)} returned")
            return SampleResponse(result, names)

        try:
            if self._completions is not None:
                await self._completions.wait(future.request_id)
            response = await fetch_result(transport, future.request_id, read)
            if self._completions is not None:
                self._completions.retrieved(future.request_id)
            return response
        except asyncio.CancelledError:
            background().run(_quietly(self._cancel(future.request_id)))
            raise

    async def _accepted(self, call: Call) -> UntypedAPIFuture:
        """The server's answer to a submitted sample. If the task is cancelled meanwhile, it is unknown whether the
        server accepted the sample, so the sample is cancelled there as soon as the answer comes."""
        wanted = True

        async def send() -> UntypedAPIFuture:
            sent = await self._session.transport.send(call, self._policy, lambda: wanted)
            return parse(sent, UntypedAPIFuture)

        async def cancel() -> None:
            await self._cancel((await sending).request_id)

        sending = asyncio.ensure_future(send())
        try:
            return await outlasting(sending)
        except asyncio.CancelledError:
            wanted = False
            background().run(_quietly(cancel()))
            raise

    async def _cancel(self, request_id: str) -> None:
        body = CancelFutureRequest(request_id=request_id).model_dump_json().encode()
        await self._session.transport.post_once("/cancel_future", body)


async def _quietly(work: Coroutine[Any, Any, Any]) -> None:
    """Send a request that is only a courtesy to the server: nobody waits for it, and its failure is ignored."""
    try:
        await work
    except WeftError:
        return


#: Joined sessions of this process, by process id, since a fork cannot use its parent's connections. A session that no
#: client uses any more is dropped once its heartbeat has stopped.
_joined: WeakValueDictionary[tuple[Any, ...], JoinedSession] = WeakValueDictionary()


def _client_of(
    handle: SamplerHandle,
    endpoint: Endpoint,
    policy: RetryPolicy | None,
    shared: RetryPolicy,
    headers: tuple[tuple[str, str], ...],
) -> SamplingClient:
    """A client of a sampler that another client, mostly of another process, made. Clients of one session share its
    connections and its heartbeat: a pool of processes is handed a client with each task."""
    about = (os.getpid(), endpoint, shared, headers, handle.session_id)
    session = _joined.get(about)
    if session is None:
        session = _joined[about] = JoinedSession(Transport(endpoint, shared, dict(headers)), handle.session_id)
    return SamplingClient(session, join_sampler(session, handle), policy, handle.record_stability_info)
