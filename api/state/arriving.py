"""Request bodies that are on their way, of everybody: bounded in bytes together.

The client decides how long a body takes to arrive, and an attacker may have keys of many organisations, or need none
(for a webhook). If there are too many bytes, the sender that holds most (an organisation; an address if it is not known
who asks) loses its oldest unfinished body. So nobody is held up by another's slow bodies, and a sender that holds
little loses nothing. A body counts until it has been read, or is worked on under another limit. Lives in the event
loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType

from api.errors import RateLimited

#: As many bytes as this many bodies of the largest size.
LARGEST_IN_ALL = 4


class Arriving:
    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes_of: Counter[str] = Counter()
        self._coming: dict[str, dict[Arrival, None]] = {}  # by sender: its unfinished bodies, the oldest first

    @property
    def size_bytes(self) -> int:
        return self._bytes_of.total()

    def body(self, whose: str) -> Arrival:
        return Arrival(self, whose)

    def add(self, body: Arrival, size_bytes: int) -> None:
        """Count more bytes of `body`. Raises RateLimited if it is itself the one to be given up."""
        self._coming.setdefault(body.whose, {}).setdefault(body)
        body.size_bytes += size_bytes
        self._bytes_of[body.whose] += size_bytes
        while self._bytes_of.total() > self._most:
            largest = max(self._coming, key=self._bytes_of.__getitem__)
            given_up = next(iter(self._coming[largest]))
            self.drop(given_up)
            if given_up is body:
                raise self.refusal()
            given_up.give_up()

    def whole(self, body: Arrival) -> None:
        """The body is complete, so it can no longer be given up."""
        coming = self._coming.get(body.whose, {})
        coming.pop(body, None)
        if not coming:
            self._coming.pop(body.whose, None)

    def drop(self, body: Arrival) -> None:
        self.whole(body)
        self._bytes_of[body.whose] -= body.size_bytes
        body.size_bytes = 0
        if not self._bytes_of[body.whose]:
            del self._bytes_of[body.whose]

    def refusal(self) -> RateLimited:
        return RateLimited(
            f"the bodies that are on their way to this server may be {self._most} bytes together, and yours were the "
            "most: send fewer at the same moment, or smaller, and each without a pause",
            reason="arriving_bodies",
            retry_after_s=1,
            scope="server",
        )


class Arrival:
    """One body, for the `with` block in which it is received and read."""

    def __init__(self, arriving: Arriving, whose: str) -> None:
        self.whose, self.size_bytes = whose, 0
        self._arriving = arriving
        self._task: asyncio.Task[object] | None = None
        self._given_up = False

    def came(self, size_bytes: int) -> None:
        """More bytes have come. Raises RateLimited."""
        self._task = asyncio.current_task()
        self._arriving.add(self, size_bytes)

    def whole(self) -> None:
        self._arriving.whole(self)

    def drop(self) -> None:
        """Forget the body's bytes: nothing of it is kept."""
        self._arriving.drop(self)

    def give_up(self) -> None:
        """Cancel the task that waits for the rest of the body."""
        assert self._task is not None
        self._given_up = True
        self._task.cancel()

    def __enter__(self) -> Arrival:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.size_bytes:
            self.drop()
        if self._given_up and isinstance(error, asyncio.CancelledError):
            assert self._task is not None
            self._task.uncancel()
            raise self._arriving.refusal() from None
