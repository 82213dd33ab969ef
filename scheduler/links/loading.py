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

from scheduler.links.board import Board
from scheduler.links.contract import QueueUnreachable
from scheduler.links.sample_link import BEAT_S, worker_name

_KEY = "{weft:loading}"
#: Longer than anything that keeps a worker's thread from running: the import of a library, the compilation of a kernel.
LAPSES_S = 15


class Loading(msgspec.Struct, frozen=True):
    """A worker of `role` (trainer, generator) that has been loading `models` for `loading_s`."""

    name: str
    role: str
    models: list[str]
    loading_s: float = 0.0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Loading).decode


class LoadingBoard(Board):
    """Callable from any thread; raises QueueUnreachable."""

    def __init__(self, url: str) -> None:
        super().__init__(url, _KEY)

    def say(self, one: Loading) -> None:
        self.put(one.name, _encode(one), LAPSES_S)

    def there(self) -> list[Loading]:
        """The workers that load, the longest first."""
        return sorted(map(_decode, self.read(LAPSES_S)), key=lambda one: -one.loading_s)


@contextmanager
def announced(url: str, role: str, models: Iterable[str]) -> Iterator[None]:
    """Publish, during the block, that this process loads `models`. If Redis is away, it is told once it is back."""
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
    """For how long the first worker of that role has been loading that model; None if none does."""
    return max((one.loading_s for one in loading if one.role == role and base_model in one.models), default=None)
