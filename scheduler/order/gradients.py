"""What an optimizer step of a run would lack: the gradient of each forward_backward before it which has failed, or the
weights of a load_state which has.

A client submits forward_backward and optim_step before it waits for either. When the first fails the second is on its
way: taken all the same it would move the weights by momentum alone, or by part of a batch. So the step fails instead,
once, and the run stays as it was. Who goes on knowing of the failure means to: our client says of what it has told its
user; of one that says nothing a forward_backward shows it that came when its client had been told of the failure, and
waited for nothing before it. Microbatches that are sent one behind the other show nothing, although a client may ask
for the first one's outcome, and hear of it, while it sends the third.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from scheduler.order.plans import SENT_AGAIN


@dataclass(frozen=True)
class Lacking:
    """What a step is told: the last operation `of` which it would lack, and what to say of that; and that its client
    knows of every failure up to operation `knows`."""

    of: tuple[int, str] = (0, "")
    knows: int = 0


#: When a client hears of what has not ended, and of failures that it was not told.
NEVER = datetime.max.replace(tzinfo=UTC)


class Gradients:
    """Of one run, since its last step that was taken, or was told what it lacks. All operations by their numbers."""

    def __init__(self) -> None:
        self._came: dict[int, datetime] = {}  # forward_backwards, and when their requests came
        self._failed: dict[int, str] = {}  # what to say
        self._over: dict[int, datetime] = {}  # when their client could know of it

    @property
    def any_failed(self) -> bool:
        return bool(self._failed)

    def came(self, seq: int, at: datetime) -> None:
        self._came[seq] = at

    def failed(self, seq: int, says: str) -> None:
        """`says` is what a step is told that counts on it."""
        self._failed.setdefault(seq, says)

    def over(self, seq: int, at: datetime) -> None:
        """It has ended well, or has failed and its client is told so."""
        self._over.setdefault(seq, at)

    def used(self, seq: int) -> None:
        """Operation `seq` has used them, told its client that some are missing, or put others in their place."""
        self._came = {other: at for other, at in self._came.items() if other > seq}
        self._failed = {other: says for other, says in self._failed.items() if other > seq}
        self._over = {other: at for other, at in self._over.items() if other > seq}

    def lacking(self, seq: int, since: int, heard_of: int | None) -> Lacking:
        """Of step `seq`, behind another at `since` that has not ended; `heard_of` is what its client says."""
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
        """When each forward_backward had been called for at the latest: before any with a higher number came, though
        its own request came late, as the first part of a batch does, which Tinker's client sends last. One that was
        sent again shows nothing."""
        made = NEVER
        for seq, came in sorted(self._came.items(), reverse=True):
            made = min(made, came) if came > SENT_AGAIN else made
            yield seq, min(made, came)
