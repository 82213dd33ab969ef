"""Uploaded losses: the check of one before it is kept, and finding it again."""

from __future__ import annotations

import logging

from weft.wire import CreateCustomLossRequest
from weft.wire.binary.train_codec import TrainBatch
from weft.wire.checks.custom_cost import check_upload
from weft.wire.checks.custom_format import (
    CustomLoss,
    decode_custom_loss,
    encode_custom_loss,
    parse_custom_loss,
)
from weft.wire.checks.custom_shapes import CustomLossError
from weft.wire.checks.losses import CUSTOM, loss_id_of

from api.errors import Invalid, quote
from scheduler.links.messages import loss_ref
from store.blobs.contract import BadRef, Blobs, Damaged

log = logging.getLogger(__name__)

#: How many losses one session may have. A loss is some kilobytes, and a session creates each of its losses once.
MAX_LOSSES = 256
MAX_GRAPH_BYTES = 256 * 1024


def checked_loss(body: CreateCustomLossRequest) -> bytes:
    """The loss in its stored form. Raises Invalid if it does what a custom loss may not do."""
    pairs = [(item.name, int(item.rank)) for item in body.inputs]
    graph = body.graph.model_dump()  # not as JSON: numbers that JSON lacks would become null, which is another loss
    try:
        check_upload(parse_custom_loss(body.name, pairs, graph))
    except CustomLossError as error:
        raise Invalid(str(error)) from None
    return encode_custom_loss(body.name, pairs, graph)


def uploaded_loss(batch: TrainBatch, session_id: str, blobs: Blobs) -> CustomLoss | None:
    """The loss that a batch names, which must be of this session; None if it names none."""
    loss_id = loss_id_of(batch.loss_fn_config) if batch.loss_fn == CUSTOM else None
    if loss_id is None:
        return None
    try:
        if not loss_id.startswith(f"{session_id}:loss:") or "/" in loss_id:
            raise BadRef(loss_id)
        return decode_custom_loss(blobs.get(loss_ref(loss_id)))
    except (BadRef, FileNotFoundError):
        raise Invalid(
            f"loss_id: no custom loss {quote(loss_id)} in this session; "
            "losses are made with create_custom_loss, for the session that makes them"
        ) from None
    except Damaged as error:
        log.error("custom loss %s: %s", loss_id, error)
        raise Invalid(
            f"loss_id: the custom loss {quote(loss_id)} is damaged on the server's disk: make it again with "
            "create_custom_loss"
        ) from None
