"""Workers that load their models, over Redis: until they have, they neither lease samples nor join the leader.

A worker says so before it begins, and again each BEAT_S from a thread. What it has said lapses LAPSES_S after the last
time: nobody has to notice that it died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress

import msgspec

from scheduler.links.contract import QueueUnreachable
from scheduler.links.redis_clients import pooled
from scheduler.links.redis_queue import reaching
from scheduler.links.sample_link import BEAT_S, worker_name

_KEY = "{weft:loading}"
#: Longer than what keeps a thread of a worker from running: the import of a library, a kernel that is compiled.
LAPSES_S = 15

#: Stores ARGV[2] as what worker ARGV[1] says, without ARGV[1] nothing; returns what was said in the last ARGV[3]
#: seconds.
_SAY = """
local now, found = tonumber(redis.call("TIME")[1]), {}
if ARGV[1] ~= "" then redis.call("HSET", KEYS[1], ARGV[1], now .. " " .. ARGV[2]) end
local all = redis.call("HGETALL", KEYS[1])
for i = 1, #all, 2 do
  local space = string.find(all[i + 1], " ", 1, true)
  if now - tonumber(string.sub(all[i + 1], 1, space - 1)) > tonumber(ARGV[3]) then
    redis.call("HDEL", KEYS[1], all[i])
  else
    found[#found + 1] = string.sub(all[i + 1], space + 1)
  end
end
return found
"""


class Loading(msgspec.Struct, frozen=True):
    """A worker of `role` (trainer, generator) that has been loading `models` for `loading_s`."""

    name: str
    role: str
    models: list[str]
    loading_s: float = 0.0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Loading).decode


class LoadingBoard:
    """Callable from any thread; raises QueueUnreachable."""

    def __init__(self, url: str) -> None:
        self._redis = pooled(url)
        self._say = self._redis.register_script(_SAY)

    def say(self, one: Loading) -> None:
        with reaching():
            self._say([_KEY], [one.name, _encode(one), LAPSES_S])

    def there(self) -> list[Loading]:
        """Those that load, the one that has for longest first."""
        with reaching():
            found = [_decode(said) for said in self._say([_KEY], ["", "", LAPSES_S])]
        return sorted(found, key=lambda one: -one.loading_s)

    def leave(self, name: str) -> None:
        with reaching():
            self._redis.hdel(_KEY, name)

    def close(self) -> None:
        self._redis.close()


@contextmanager
def announced(url: str, role: str, models: Iterable[str]) -> Iterator[None]:
    """Say within the block that this process loads `models`. A Redis that is away is told when it is back."""
    name, since, over = worker_name(role), time.monotonic(), threading.Event()
    told = Loading(name, role, sorted(models))

    def beat(board: LoadingBoard) -> None:
        while True:
            with suppress(QueueUnreachable):
                board.say(msgspec.structs.replace(told, loading_s=time.monotonic() - since))
            if over.wait(BEAT_S):
                return

    with closing(LoadingBoard(url)) as board:
        thread = threading.Thread(target=beat, args=(board,), name="loading", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            with suppress(QueueUnreachable):
                board.leave(name)


def longest(loading: Iterable[Loading], role: str, base_model: str) -> float | None:
    """For how long the first of that role has been loading that model."""
    return max((one.loading_s for one in loading if one.role == role and base_model in one.models), default=None)
