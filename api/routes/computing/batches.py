"""forward and forward_backward: one endpoint, protobuf in, with `forward_only` to tell them apart; and as JSON."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from weft.wire import UntypedAPIFuture
from weft.wire.binary import weft_wire_pb2 as pb
from weft.wire.binary.arrays import write_tensor
from weft.wire.binary.train_codec import decode_train_request
from weft.wire.error import WireError

from api.checks.batches import check_batch, costs
from api.checks.custom_losses import uploaded_loss
from api.checks.provenance import named_sequences, with_recorded_logprobs
from api.errors import ApiError, Invalid, TooLarge, Unreadable, quote
from api.http.access import declare
from api.http.auth import PrincipalDep
from api.http.bodies import INLINE_PROTOBUF_BYTES, parse, parse_protobuf, read_body
from api.http.body_sizes import ROOM_KEY
from api.http.headers import header
from api.http.json_forms import PROTOBUF, train_body
from api.http.structure import begins_with
from api.operations.submit import Address, Checked, submit
from api.state.service import Service, ServiceDep
from api.who.principal import Principal
from scheduler.links.messages import OpKind
from scheduler.order.plans import SENT_AGAIN, ForwardBackward, slices
from store import tables

router = APIRouter(prefix="/api/v1")

#: How many values the inputs of one operation may expand to. A sparse tensor can claim far more than it contains.
MAX_VALUES = 2**26
#: The loss whose data may come without logprobs: those are then read from what was recorded.
RECORDED = "stable_reinforce"


@router.post(
    "/forward_backward",
    response_model_exclude_none=True,
    **declare(scope="train", limit="work", meters="train", body="data"),
)
async def forward_backward(request: Request, service: ServiceDep, who: PrincipalDep) -> UntypedAPIFuture:
    """One chunk of data. What is wrong with the data is told through the future: Tinker's client sends the first
    chunk only after the others were answered, and would wait for ever for one that was answered with an error."""
    came_at = _came_at(request)
    form = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if form == "application/json":
        return await _submit_json(request, service, who, forward_only=False)
    if form != PROTOBUF:
        raise Unreadable(f"forward_backward takes {PROTOBUF} or application/json, not {quote(form)}")
    try:
        body = await read_body(request)
        small = len(body) <= INLINE_PROTOBUF_BYTES
        message = _parse(body) if small else await service.work(len(body), partial(_parse, body))
    except TooLarge as error:
        return await _refuse_unread(request, service, who, error)
    address = Address(model_id=message.model_id, seq_id=message.seq_id)
    kind = OpKind.FORWARD if message.forward_only else OpKind.FORWARD_BACKWARD

    def check(run: tables.Run) -> Checked:
        return _check(service, message, body, run, came_at)

    reads = message.loss_fn == RECORDED
    return await _told(request, submit(service, who, address, kind, body, check, reads=reads))


async def _refuse_unread(request: Request, service: Service, who: Principal, error: TooLarge) -> UntypedAPIFuture:
    """Spend the number of an operation whose body was too large: its first fields say which operation it is. Tinker's
    client has counted it, and its later operations would wait for that number."""
    match begins_with(error.begins, 1, 2):
        case [bytes(model_id), int(seq)]:
            address = Address(model_id=model_id.decode(errors="replace"), seq_id=seq)
        case _:
            raise error

    def check(run: tables.Run) -> Checked:
        raise error

    return await _told(request, submit(service, who, address, OpKind.FORWARD_BACKWARD, error.begins, check))


@router.post(
    "/forward",
    response_model_exclude_none=True,
    **declare(scope="train", limit="work", meters="prefill", body="data"),
)
async def forward(request: Request, service: ServiceDep, who: PrincipalDep) -> UntypedAPIFuture:
    """The JSON form of a forward_backward that is `forward_only`, which has an address of its own."""
    return await _submit_json(request, service, who, forward_only=True)


async def _submit_json(request: Request, service: Service, who: Principal, forward_only: bool) -> UntypedAPIFuture:
    """Submit the operation of a JSON body, which is stored and executed in its protobuf form."""
    came_at = _came_at(request)
    raw = await read_body(request)

    def check(run: tables.Run) -> Checked:
        body = train_body(raw, forward_only)
        checked = _check(service, _parse(body), body, run, came_at)
        return checked if checked.body is not None else replace(checked, body=body)

    address = await parse(service, raw, Address)
    kind = OpKind.FORWARD if forward_only else OpKind.FORWARD_BACKWARD
    return await _told(request, submit(service, who, address, kind, raw, check))


async def _told(request: Request, submitting: Awaitable[tuple[UntypedAPIFuture, ApiError | None]]) -> UntypedAPIFuture:
    """The future of a submitted operation. A refusal is told by the future alone; the body's room is told that it was
    refused."""
    future, refused = await submitting
    request.scope[ROOM_KEY].refused = refused is not None
    return future


def _came_at(request: Request) -> datetime:
    """The time at which the request first came; SENT_AGAIN if Tinker's client says that it sends a refused request
    again."""
    again = header(request.scope, b"x-stainless-retry-count") or "0"
    return datetime.now(UTC) if again == "0" else SENT_AGAIN


def _parse(body: bytes) -> pb.ForwardBackwardRequest:
    return parse_protobuf(body, pb.ForwardBackwardRequest)


def _check(
    service: Service, message: pb.ForwardBackwardRequest, body: bytes, run: tables.Run, came_at: datetime
) -> Checked:
    limits = service.settings.limits
    if len(message.data) > limits.max_data:
        raise Invalid(f"data: {len(message.data)} data, the limit is {limits.max_data} per operation: send several")
    _check_claims(message)
    try:
        batch = decode_train_request(body)
    except WireError as error:
        raise Invalid(str(error)) from None
    custom = uploaded_loss(batch, run.session_id, service.blobs)
    recorded: dict[int, Any] = {}
    if batch.loss_fn == RECORDED:
        batch, recorded = with_recorded_logprobs(batch, run.session_id, service.blobs)
    lengths = check_batch(batch, service.limits, run.base_model, custom)
    cuts = slices(costs(batch, lengths, custom), service.settings.trainer.slice_tokens)
    plan = ForwardBackward(tuple(cuts), {} if message.forward_only else named_sequences(batch), came_at)
    return Checked(plan, sum(lengths), _completed(body, recorded) if recorded else None)


def _completed(body: bytes, logprobs: Mapping[int, Any]) -> bytes:
    """The body with the logprobs recorded for its data, as if the client had sent them."""
    message = _parse(body)
    for index, values in logprobs.items():
        write_tensor(message.data[index].loss_fn_inputs["logprobs"], values, f"data[{index}].logprobs")
    return message.SerializeToString()


def _check_claims(message: pb.ForwardBackwardRequest) -> None:
    """Check how large the inputs claim to be, before anything is expanded."""
    values = 0
    for index, datum in enumerate(message.data):
        for name, tensor in datum.loss_fn_inputs.items():
            if tensor.WhichOneof("encoding") == "sparse_csr":
                values += max(0, math.prod(tensor.shape))
            if values > MAX_VALUES:
                raise Invalid(
                    f"datum {index}: {name} has shape {list(tensor.shape)}; all sparse inputs of one operation may "
                    f"unfold to {MAX_VALUES} values at most: send fewer data in one operation"
                )
