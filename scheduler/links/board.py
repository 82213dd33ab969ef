"""A board in Redis where processes publish something under their names, again and again. What a silent process has
published lapses, so nobody has to notice that it died."""

from __future__ import annotations

from scheduler.links.redis_clients import pooled
from scheduler.links.redis_queue import reaching

#: Publishes ARGV[2] under the name ARGV[1] (nothing if that is empty), and returns what others have published in the
#: last ARGV[3] seconds.
_EXCHANGE = """
local now, others = tonumber(redis.call("TIME")[1]), {}
if ARGV[1] ~= "" then redis.call("HSET", KEYS[1], ARGV[1], now .. " " .. ARGV[2]) end
local all = redis.call("HGETALL", KEYS[1])
for i = 1, #all, 2 do
  local space = string.find(all[i + 1], " ", 1, true)
  if now - tonumber(string.sub(all[i + 1], 1, space - 1)) > tonumber(ARGV[3]) then
    redis.call("HDEL", KEYS[1], all[i])
  elseif all[i] ~= ARGV[1] then
    others[#others + 1] = string.sub(all[i + 1], space + 1)
  end
end
return others
"""


class Board:
    """An entry lapses if it is not published again in time. Callable from any thread; raises QueueUnreachable."""

    def __init__(self, url: str, key: str) -> None:
        self._key = key
        self._redis = pooled(url)
        self._script = self._redis.register_script(_EXCHANGE)

    def put(self, name: str, said: bytes, lapses_s: int) -> list[bytes]:
        """Publish an entry; returns the entries of the others."""
        with reaching():
            found: list[bytes] = self._script([self._key], [name, said, lapses_s])
        return found

    def read(self, lapses_s: int) -> list[bytes]:
        """The entries of all."""
        return self.put("", b"", lapses_s)

    def leave(self, name: str) -> None:
        with reaching():
            self._redis.hdel(self._key, name)

    def close(self) -> None:
        self._redis.close()
