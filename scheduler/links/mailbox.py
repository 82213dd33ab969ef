"""One direction of a link over Redis: a stream to which one process appends and which one reads, where each message
arrives once and in order, whichever reply of Redis is lost with its connection.

Who has no reply does it again: an append that was done may be done twice, and what was taken would be gone. So
messages have numbers. The reader takes away only what it is known to have had, and drops what comes again. To take
away, to look and to wait is one trip.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.links.redis_clients import LONGEST_BLOCK_S, Client, entries_of

#: Appends that are read at once.
MOST_AT_ONCE = 64
#: A mailbox that nobody writes to any more is forgotten after this.
LEFT_OVER_S = 3600

#: A message behind its number, from 1. What is appended again keeps the one that it has.
Numbered = tuple[int, bytes]


def append(client: Client, key: str, messages: Sequence[Numbered]) -> None:
    """One at least. Raises errors of redis-py."""
    pipe = client.pipeline(transaction=False)
    pipe.execute_command("XADD", key, "*", *(part for message in messages for part in message))  # type: ignore[no-untyped-call]
    pipe.expire(key, LEFT_OVER_S)
    pipe.execute()


class Reader:
    """For one thread at a time. `client` may block (`scheduler.links.redis_clients.blocking`)."""

    def __init__(self, client: Client, key: str) -> None:
        self._client, self._key = client, key
        self._had, self._seen = b"0-0", 0  # the latest append and message that came here

    def next(self, timeout_s: float) -> list[bytes]:
        """All that is there, or comes first within `timeout_s`; it is given once. Raises errors of redis-py."""
        block_ms = int(min(timeout_s, LONGEST_BLOCK_S) * 1000) or None
        pipe = self._client.pipeline(transaction=False)
        at, _, number = self._had.partition(b"-")
        pipe.xtrim(self._key, minid=f"{at.decode()}-{int(number) + 1}", approximate=False)
        pipe.xread({self._key: self._had}, MOST_AT_ONCE, block_ms)
        fresh = list[bytes]()
        for self._had, messages in entries_of(pipe.execute()[1]):
            for number, message in messages.items():
                if int(number) > self._seen:
                    self._seen = int(number)
                    fresh.append(message)
        return fresh
