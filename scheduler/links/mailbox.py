"""One direction of a link over Redis: a list to which one process appends and which one reads, where each message
arrives once and in order, whichever reply of Redis is lost with its connection.

Who has no reply does it again: an append that was done may be done twice, and what was taken would be gone. So
messages have numbers. The reader takes away only what it is known to have had, and drops what comes again.
"""

from __future__ import annotations

from typing import Any

from scheduler.links.redis_clients import LONGEST_BLOCK_S, Client

#: Messages read at once.
MOST_AT_ONCE = 256

#: Takes away the messages up to number ARGV[1], and returns up to ARGV[2] of the others.
_READ = """
local head = redis.call("LINDEX", KEYS[1], 0)
while head and tonumber(string.match(head, "^%d+")) <= tonumber(ARGV[1]) do
  redis.call("LPOP", KEYS[1])
  head = redis.call("LINDEX", KEYS[1], 0)
end
return redis.call("LRANGE", KEYS[1], 0, ARGV[2] - 1)
"""


class Numbers:
    """The writer's: gives each message its number. What is appended again keeps the one that it has."""

    def __init__(self) -> None:
        self._latest = 0

    def put_on(self, message: bytes) -> bytes:
        self._latest += 1
        return b"%d %b" % (self._latest, message)


class Reader:
    """For one thread at a time. `client` may block (`scheduler.links.redis_clients.blocking`)."""

    def __init__(self, client: Client, key: str) -> None:
        self._client, self._key = client, key
        self._script = client.register_script(_READ)
        self._seen = 0

    def next(self, timeout_s: float) -> list[bytes]:
        """All that is there, or comes first within `timeout_s`; it is given once. Raises errors of redis-py."""
        return self._read() or (self._read() if timeout_s > 0 and self._wait(timeout_s) else [])

    def _wait(self, timeout_s: float) -> bool:
        """Until there is a message, which stays where it is."""
        key, longest_s = self._key, min(timeout_s, LONGEST_BLOCK_S)
        return self._client.blmove(key, key, longest_s, "LEFT", "LEFT") is not None  # type: ignore[arg-type]

    def _read(self) -> list[bytes]:
        found: Any = self._script(keys=[self._key], args=[self._seen, MOST_AT_ONCE])
        fresh = list[bytes]()
        for numbered in found:
            number, _, message = numbered.partition(b" ")
            if int(number) > self._seen:
                self._seen = int(number)
                fresh.append(message)
        return fresh
