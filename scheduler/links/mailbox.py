"""One direction of a link over Redis: a stream to which one process appends and which one reads, where each message
arrives once and in order, whichever reply of Redis is lost with its connection.

A call without a reply is repeated, so an append may happen twice, and a message deleted when it is read could be lost.
Therefore messages have numbers. The reader deletes only messages that it is known to have received, and drops repeated
ones. Deleting, reading and waiting are one round trip.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.links.redis_clients import LONGEST_BLOCK_S, Client, entries_of

#: How many appends are read at once.
MOST_AT_ONCE = 64
#: A mailbox that nobody writes to is deleted after this time.
LEFT_OVER_S = 3600

#: A number (from 1) and a message. A repeated append keeps the message's number.
Numbered = tuple[int, bytes]


def append(client: Client, key: str, messages: Sequence[Numbered]) -> None:
    """Append at least one message. Raises errors of redis-py."""
    pipe = client.pipeline(transaction=False)
    pipe.execute_command("XADD", key, "*", *(part for message in messages for part in message))  # type: ignore[no-untyped-call]
    pipe.expire(key, LEFT_OVER_S)
    pipe.execute()


class Reader:
    """For one thread at a time. `client` may block (`scheduler.links.redis_clients.blocking`)."""

    def __init__(self, client: Client, key: str) -> None:
        self._client, self._key = client, key
        self._had, self._seen = b"0-0", 0  # id of the latest append, and number of the latest message, that came here

    def next(self, timeout_s: float) -> list[bytes]:
        """All new messages; if there are none, those that come first within `timeout_s`. Each is returned once. Raises
        errors of redis-py."""
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
