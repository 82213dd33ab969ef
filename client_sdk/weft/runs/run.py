"""One training run as seen from the background loop: submitting its operations in order and fetching results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import httpx
import zstandard
from pydantic import BaseModel

from weft.errors import GradientMissingError, RequestFailedError
from weft.future import outlasting
from weft.runs.chunks import join, split
from weft.runs.lane import Lane, Turn
from weft.runs.session import Session
from weft.transport.http import PROTOBUF, Call, encode, parse
from weft.transport.poll import fetch_result
from weft.wire.base import Request
from weft.wire.binary.request_codec import decode_forward_backward_output, encode_forward_backward
from weft.wire.checks.runs import is_not_taken
from weft.wire.inputs import Datum
from weft.wire.service import UntypedAPIFuture
from weft.wire.shown import arguments
from weft.wire.training import (
    CreateModelRequest,
    CreateModelResponse,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    GetInfoRequest,
    GetInfoResponse,
)
from weft.wire.weights import LoadWeightsRequest, LoadWeightsResponse

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")

LossConfig = dict[str, float | str] | None


class Run:
    """A run of `session`: `model_id` and `info` are there once it is made."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.model_id = ""
        self.info: GetInfoResponse | None = None
        self._lane = Lane()
        #: Why some of the gradient for the next optimizer step never reached the server; the server reports all other
        #: losses.
        self._missing: Exception | None = None
        #: The caller had been told of every failure up to this number, and went on.
        self.heard_of = 0

    async def make(self, request: Callable[..., CreateModelRequest | LoadWeightsRequest]) -> None:
        """Make the run on the server, before any of its operations. `request` lacks `session_id` and `model_seq_id`."""
        async with self._lane.turn():
            try:
                session_id = await self.session.id()
                number = next(self.session.model_numbers)
                self.model_id = f"{session_id}:train:{number}"
                with arguments(optimizer_config="optimizer"):
                    asked = request(session_id=session_id, model_seq_id=number)
                await self._make(asked)
                body = GetInfoRequest(model_id=self.model_id).model_dump_json().encode()
                self.info = await self.session.transport.ask("POST", "/get_info", GetInfoResponse, body)
            except BaseException as error:
                self._lane.break_off(error)
                raise

    async def _make(self, request: CreateModelRequest | LoadWeightsRequest) -> None:
        transport = self.session.transport
        if isinstance(request, CreateModelRequest):
            future = await transport.ask("POST", "/create_model", UntypedAPIFuture, encode(request.body()))
            made = await fetch_result(transport, future.request_id, lambda answer: parse(answer, CreateModelResponse))
            self.model_id = made.model_id
        else:
            future = await transport.ask("POST", "/load_weights", UntypedAPIFuture, encode(request.body()))
            await fetch_result(transport, future.request_id, lambda answer: parse(answer, LoadWeightsResponse))

    async def in_turn(self, work: Callable[[Turn], Awaitable[R]]) -> R:
        """Do `work` once every earlier operation was answered. It is done even if the caller stops waiting."""

        async def take() -> R:
            async with self._lane.turn() as turn:
                return await work(turn)

        return await outlasting(take())

    async def add_gradient(self, work: Callable[[Turn], Awaitable[R]], told: bool) -> R:
        """`in_turn`, for work that adds to the gradient. If some of it does not reach the server, the next optimizer
        step is not sent. A caller who was `told` of every failure before, and calls this again, accepts those
        failures."""

        async def noted(turn: Turn) -> R:
            self._going_on(turn, told)
            try:
                return await work(turn)
            except Exception as error:
                self._missing = error
                raise

        return await self.in_turn(noted)

    async def step(self, request: Callable[[int], Request], answer: type[M]) -> M:
        """An optimizer step over everything called before it. Raises `GradientMissingError`, once, if some of that is
        missing, unless the caller was told of it and went on."""

        async def submit(turn: Turn) -> UntypedAPIFuture:
            if self._missing is not None:
                missing, self._missing = self._missing, None
                raise GradientMissingError(
                    f"optim_step was not sent: a forward_backward before it was not, so its gradient is missing "
                    f"({missing}). Repeat that, and the step; all other gradients since the last are there"
                ) from missing
            return await self._post(
                turn, Call("POST", "/optim_step", encode(request(turn.next_seq()).body()), patient=True)
            )

        future = await self.in_turn(submit)
        try:
            return await fetch_result(self.session.transport, future.request_id, lambda got: parse(got, answer))
        except RequestFailedError as error:
            if is_not_taken(error.message):
                raise GradientMissingError(str(error)) from error
            raise

    def _going_on(self, turn: Turn, told: bool) -> None:
        if told:
            self._missing, self.heard_of = None, turn.next_seq() - 1

    async def operate(self, path: str, request: Callable[[int], Request], answer: type[M], told: bool = False) -> M:
        """One JSON operation: submit it in turn (`request` is told its number) and fetch its result. `told`: see
        `add_gradient`."""

        async def submit(turn: Turn) -> UntypedAPIFuture:
            self._going_on(turn, told)
            return await self._post(turn, Call("POST", path, encode(request(turn.next_seq()).body()), patient=True))

        future = await self.in_turn(submit)
        return await fetch_result(self.session.transport, future.request_id, lambda got: parse(got, answer))

    async def forward(self, data: Sequence[Datum], loss_fn: str, config: LossConfig) -> ForwardBackwardOutput:
        """A forward over `data`, in as many parts as it needs."""
        return await self.fetch_parts(await self.in_turn(partial(self._submit, data, loss_fn, config, True)))

    async def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, config: LossConfig, told: bool
    ) -> ForwardBackwardOutput:
        """A forward_backward over `data`, in as many parts as it needs. `told`: see `add_gradient`."""
        work = partial(self._submit, data, loss_fn, config, False)
        return await self.fetch_parts(await self.add_gradient(work, told))

    async def _submit(
        self, data: Sequence[Datum], loss_fn: str, config: LossConfig, forward_only: bool, turn: Turn
    ) -> list[str]:
        return await self.submit_parts(turn, self.parts(data), loss_fn, config, forward_only)

    def parts(self, data: Sequence[Datum]) -> list[list[Datum]]:
        """`data` cut to the sizes that the server wants."""
        config = self.session.config
        return split(data, config.fwdbwd_max_chunk_len, config.fwdbwd_max_chunk_bytes_count)

    async def submit_parts(
        self, turn: Turn, parts: list[list[Datum]], loss_fn: str, config: LossConfig, forward_only: bool
    ) -> list[str]:
        """Submit one operation per part, one after the other, up to one that is refused; their request ids."""
        ids = list[str]()
        for part in parts:
            request = ForwardBackwardRequest(
                ForwardBackwardInput(part, loss_fn, config), self.model_id, turn.next_seq(), forward_only
            )
            call = await asyncio.to_thread(self._forward_call, request)
            future = await self._post(turn, call)
            ids.append(future.request_id)
            if future.refused is not None and not forward_only:
                break
        return ids

    def _forward_call(self, request: ForwardBackwardRequest) -> Call:
        body, headers = encode_forward_backward(request), {}
        if self.session.config.proto_compress_fwdbwd:
            body, headers = zstandard.compress(body), {"Content-Encoding": "zstd"}
        return Call("POST", "/forward_backward", body, PROTOBUF, headers=headers, patient=True)

    async def fetch_parts(self, ids: list[str]) -> ForwardBackwardOutput:
        """The joined result of all parts."""

        def read(answer: httpx.Response) -> ForwardBackwardOutput:
            return decode_forward_backward_output(answer.content)

        return join(await asyncio.gather(*(fetch_result(self.session.transport, id_, read) for id_ in ids)))

    async def _post(self, turn: Turn, call: Call) -> UntypedAPIFuture:
        turn.sending()
        future = parse(await self.session.transport.send(call), UntypedAPIFuture)
        turn.answered()
        return future
