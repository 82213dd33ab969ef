"""What an optimizer step of a run would lack: the gradient of each forward_backward before it which has failed, or the
weights of a load_state which has.

A client submits forward_backward and optim_step before it waits for either. When the first fails the second is on its
way: taken all the same it would move the weights by momentum alone, or by part of a batch. So the step fails instead,
once, and the run stays as it was. Who goes on knowing of the failure means to: our client says of what it has told its
user; of one that says nothing a forward_backward that came after the failure shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Lacking:
    """What a step is told: the last operation `of` which it would lack, and what to say of that; and that its client
    knows of every failure up to operation `knows`."""

    of: tuple[int, str] = (0, "")
    knows: int = 0


class Gradients:
    """Of one run, since its last step that was taken, or was told what it lacks."""

    def __init__(self) -> None:
        self._came: dict[int, datetime] = {}  # forward_backwards by number, and when they were accepted
        self._failed: dict[int, tuple[str, datetime]] = {}  # what to say, and when

    @property
    def any_failed(self) -> bool:
        return bool(self._failed)

    def came(self, seq: int, accepted_at: datetime) -> None:
        self._came[seq] = accepted_at

    def failed(self, seq: int, says: str, at: datetime) -> None:
        """`says` is what a step is told that counts on it."""
        self._failed.setdefault(seq, (says, at))

    def used(self, seq: int) -> None:
        """Operation `seq` has used them, told its client that some are missing, or put others in their place."""
        self._came = {other: at for other, at in self._came.items() if other > seq}
        self._failed = {other: told for other, told in self._failed.items() if other > seq}

    def lacking(self, seq: int, since: int, heard_of: int | None) -> Lacking:
        """Of step `seq`, behind another at `since` that has not ended; `heard_of` is what its client says."""
        failed = {other: told for other, told in self._failed.items() if since < other < seq}
        if heard_of is not None:
            unknown = {other: says for other, (says, _) in failed.items() if other > heard_of}
            return Lacking(max(unknown.items(), default=(0, "")), heard_of)
        if not failed:
            return Lacking()
        last_failed, came = max(failed), {other: at for other, at in self._came.items() if since < other < seq}
        last = max(came, default=0)
        # Parts of one batch are sent with the first of them last: what came before that knew of nothing.
        known_at = max([at for _, at in failed.values()] + [at for other, at in came.items() if other < last_failed])
        if last > last_failed and came[last] >= known_at:
            return Lacking(knows=last_failed)
        return Lacking((last_failed, failed[last_failed][0]))
