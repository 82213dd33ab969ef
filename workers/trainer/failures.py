"""The error messages of failed operations."""

from __future__ import annotations

import errno
import logging
import os

from scheduler.links.messages import Failure, OpKind, TrainOp
from store.blobs.contract import BadRef, Damaged, StoreAway, is_lasting
from workers.model.memory import is_out_of_memory
from workers.trainer.progress import BadOperation, Part
from workers.trainer.runs.state import DamagedState, StateError
from workers.trainer.steps.adamw import OptimizerError

log = logging.getLogger(__name__)


class NotResident(LookupError):
    """The operation needs something that this trainer does not hold: an error of the service, not of the user."""


class GradientMissing(ValueError):
    """A step that is not taken, because an operation before it has failed that its client may not know of."""


def failure_of(error: Exception) -> Failure:
    """The failure as the user is told it. Everything but a user's own mistake is logged with its traceback."""
    if isinstance(error, DamagedState):
        return Failure(str(error))
    if isinstance(error, BadOperation | OptimizerError | StateError | GradientMissing):
        return Failure(str(error), "user")
    if not isinstance(error, NotResident):
        log.error("an operation failed", exc_info=error)
    if isinstance(error, Damaged):
        return Failure("what this operation needs is damaged on the server's disk")
    if isinstance(error, BadRef | OSError):
        return Failure(f"the trainer could not read or write what the operation needs ({type(error).__name__})")
    return Failure(f"{type(error).__name__}: {error}")


def too_large(part: Part) -> str:
    """The message for an operation of which a part did not fit in memory even alone."""
    if part.stop - part.start == 1:
        return (
            f"out of memory: datum {part.start} has {part.tokens} tokens, more than this server can train on at once. "
            "Send shorter sequences, or have the operator give the trainer more memory"
        )
    return (
        f"out of memory: data {part.start} to {part.stop - 1} have {part.tokens} tokens, more than this server can "
        "train on at once. Send shorter sequences, or have the operator lower [trainer] slice_tokens"
    )


def may_pass(error: Exception) -> bool:
    """True if trying again may help: after an error of a disk, or a lack of memory."""
    return not is_lasting(error) or is_out_of_memory(error)


def cannot_now(op: TrainOp, error: Exception) -> str:
    """Why a run is set aside whose operation may be tried again."""
    usual = errno.ENOMEM if is_out_of_memory(error) else errno.EIO
    what = error if isinstance(error, StoreAway) else os.strerror(getattr(error, "errno", None) or usual)
    return f"operation {op.seq}: {type(error).__name__}, {what}"


def cannot_replay(op: TrainOp, failure: Failure) -> str:
    """Why a run is set aside for good."""
    what = "its snapshot" if op.kind is OpKind.CREATE and op.source_ref else f"operation {op.seq} ({op.kind})"
    return f"{what} cannot be repeated: {failure.message}"
