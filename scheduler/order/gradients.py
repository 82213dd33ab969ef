"""What an optimizer step of a run would lack: the gradient of each forward_backward before it which has failed, or the
weights of a load_state which has.

A client submits forward_backward and optim_step before it waits for either. When the first fails the second is already
on its way. If it were taken, it would move the weights by momentum alone, or by part of a batch. So the step fails
instead, once, and the run stays as it was. A client that knows of the failure and still goes on wants the step: our
client reports which failures it has told its user of. For a client that reports nothing, a later forward_backward shows
it: one that came after its client had been told of the failure, and did not have to wait for an earlier operation.
Microbatches that are sent one behind the other show nothing, although a client may ask for the first one's outcome, and
hear of it, while it sends the third.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from scheduler.order.plans import SENT_AGAIN


@dataclass(frozen=True)
class Lacking:
    """What a step lacks. `of`: the number of the last failed operation that the step depends on, and its error text.
    `knows`: the number up to which the client knows of every failure."""

    of: tuple[int, str] = (0, "")
    knows: int = 0


#: The time at which a client knows of an operation that has not ended, or of a failure that it was not told.
NEVER = datetime.max.replace(tzinfo=UTC)


class Gradients:
    """The operations that a run's next step depends on, by number: those since the last step that was taken, or that
    failed because of what it lacked."""

    def __init__(self) -> None:
        self._came: dict[int, datetime] = {}  # by number of a forward_backward: when its request came
        self._failed: dict[int, str] = {}  # by number of a failed operation: the error text for a step
        self._over: dict[int, datetime] = {}  # by number: when the client could know how it ended

    @property
    def any_failed(self) -> bool:
        return bool(self._failed)

    def came(self, seq: int, at: datetime) -> None:
        self._came[seq] = at

    def failed(self, seq: int, says: str) -> None:
        """Operation `seq` failed. `says` is the error text for a step that depends on it."""
        self._failed.setdefault(seq, says)

    def over(self, seq: int, at: datetime) -> None:
        """Operation `seq` has ended well, or its failure was told to its client, at that time."""
        self._over.setdefault(seq, at)

    def used(self, seq: int) -> None:
        """Operation `seq` has used the gradients, told its client that some are missing, or replaced them."""
        self._came = {other: at for other, at in self._came.items() if other > seq}
        self._failed = {other: says for other, says in self._failed.items() if other > seq}
        self._over = {other: at for other, at in self._over.items() if other > seq}

    def lacking(self, seq: int, since: int, heard_of: int | None) -> Lacking:
        """What step `seq` lacks, if an earlier step or load at number `since` has not ended. `heard_of` is what its
        client reports."""
        failed = {other: says for other, says in self._failed.items() if since < other < seq}
        if heard_of is not None:
            unknown = {other: says for other, says in failed.items() if other > heard_of}
            return Lacking(max(unknown.items(), default=(0, "")), heard_of)
        if not failed:
            return Lacking()
        last_failed, came = max(failed), {other: at for other, at in self._made() if since < other < seq}
        known_at = max(self._over.get(other, NEVER) for other in {*failed, *came} if other <= last_failed)
        for other, at in sorted(came.items()):
            if other > last_failed:
                if at >= known_at:
                    return Lacking(knows=last_failed)
                known_at = max(known_at, self._over.get(other, NEVER))
        return Lacking((last_failed, failed[last_failed]))

    def _made(self) -> Iterator[tuple[int, datetime]]:
        """By number of a forward_backward: the latest time at which its client can have called for it. That is before
        any with a higher number came, even if its own request came later: Tinker's client sends the first part of a
        batch last. A request that was sent again shows nothing."""
        made = NEVER
        for seq, came in sorted(self._came.items(), reverse=True):
            made = min(made, came) if came > SENT_AGAIN else made
            yield seq, min(made, came)
