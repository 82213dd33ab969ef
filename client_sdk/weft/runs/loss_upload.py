"""Sending a traced loss to a server that runs custom losses itself."""

from __future__ import annotations

from dataclasses import replace

from weft.loss_handle import LossHandle
from weft.runs.session import Session
from weft.transport.http import encode, parse
from weft.transport.poll import fetch_result
from weft.wire.losses import CreateCustomLossRequest, CreateCustomLossResponse
from weft.wire.service import UntypedAPIFuture


async def upload_loss(session: Session, handle: LossHandle) -> LossHandle:
    """The handle with the server's id of it, or without where losses are run by the client."""
    session_id = await session.id()
    if not session.config.custom_loss_server_side:
        return replace(handle, session_id=session_id)
    request = CreateCustomLossRequest(
        session_id=session_id,
        custom_loss_seq_id=next(session.loss_numbers),
        name=handle.name,
        inputs=list(handle.inputs),
        graph=handle.encoded(),
    )
    transport = session.transport
    future = await transport.ask("POST", "/create_custom_loss", UntypedAPIFuture, encode(request.body()))
    made = await fetch_result(transport, future.request_id, lambda answer: parse(answer, CreateCustomLossResponse))
    return replace(handle, session_id=session_id, loss_id=made.loss_id)
