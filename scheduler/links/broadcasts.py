"""Messages between processes over Redis: that operations were accepted and have ended, and messages for workers. Any of
them may be lost; what must be known for certain is also looked up in the database now and then.

Each end of an operation gets a stamp, microseconds of Redis' clock that only grow, so that a client's cursor means the
same on every replica (`scheduler.journal.ending.completions`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import redis

from scheduler.links.contract import QueueUnreachable
from scheduler.links.messages import Cancel, Drawn, FailureTold, PolicyMoved
from scheduler.links.redis_clients import blocking, pooled, pop_all
from scheduler.links.redis_queue import reaching

log = logging.getLogger(__name__)

_ENDED, _WORKERS, _ACCEPTED, _DRAWN = "weft:ends", "weft:workers", "weft:accepted", "weft:drawn"
#: The channel that tells all generators a list of PolicyMoved.
POLICIES = "weft:policies"
_GENERATORS = "{weft:generators}"
_WORKED = "{weft:generators}:worked"
#: How long, in seconds, a generator is listed by name after it last worked; at most MOST_SHOWN of them, the latest.
SHOWN_S = 3600
MOST_SHOWN = 256
#: How many accepted operations may wait for a leader; it finds the others in the database.
MOST_ACCEPTED = 10_000
#: How many of these it takes at once.
MOST_AT_ONCE = 256
#: How long the tokens of a streamed sample are kept after its newest ones, for clients that begin to read.
DRAWN_LASTS_S = 600
#: Pause before another attempt to reach Redis.
RETRY_S = 0.5

#: Reserves ARGV[1] stamps after ARGV[4], publishes ARGV[3] (unless empty) on ARGV[2] with the last of them, and returns
#: the first.
_STAMP = """
local time = redis.call("TIME")
local first = math.max(time[1] * 1000000 + time[2], (redis.call("GET", KEYS[1]) or 0) + 1, ARGV[4] + 1)
local last = string.format("%.0f", first + ARGV[1] - 1)
redis.call("SET", KEYS[1], last)
if ARGV[3] ~= "" then redis.call("PUBLISH", ARGV[2], last .. " " .. ARGV[3]) end
return string.format("%.0f", first)
"""


class Told(msgspec.Struct, frozen=True):
    """The outcome of an operation, if it is small enough to travel with the broadcast."""

    payload: bytes
    content_type: str
    error: str | None
    category: str


class Ended(msgspec.Struct, frozen=True):
    """An operation has its outcome, in the database. `size_bytes` of its result; None if it failed. Without `told`,
    the outcome has to be read there."""

    op_id: str
    org_id: str
    lane: str
    seq: int
    kind: str
    size_bytes: int | None = None
    told: Told | None = None


class ToWorker(msgspec.Struct, frozen=True):
    """A message for one worker, or for all ("")."""

    worker: str
    message: Cancel | PolicyMoved


class Accepted(msgspec.Struct, frozen=True):
    """A message for the leader. Operation `op_id` is queued, as `packed` says (`scheduler.journal.rows.pack`); without
    `packed`, read it from the database. Or run `closed_run` is to be closed, or a client was `told` of a failure."""

    op_id: str = ""
    closed_run: str = ""
    packed: bytes = b""
    told: FailureTold | None = None


_encode = msgspec.msgpack.Encoder().encode
_ended = msgspec.msgpack.Decoder(list[Ended])
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_moves = msgspec.msgpack.Decoder(list[PolicyMoved])
_accepted = msgspec.msgpack.Decoder(Accepted)
_drawn = msgspec.msgpack.Decoder(Drawn)


class Broadcasts:
    """Sends broadcasts, and reads the leader's mailbox. Callable from any thread; raises QueueUnreachable."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._redis = pooled(url)
        self._reader = blocking(url)
        self._latest = 0  # latest stamp reserved here: a Redis that has lost everything must not go back behind it
        self._stamp = self._redis.register_script(_STAMP)

    def ended(self, ends: Sequence[Ended]) -> None:
        """Announce ended operations, in this order; at least one."""
        with reaching():
            self._take_stamps(len(ends), _encode(ends))

    def reserve(self, stamps: int) -> int:
        """Reserve `count` stamps, all later than any announced before; returns the first."""
        with reaching():
            return self._take_stamps(stamps, b"")

    def _take_stamps(self, stamps: int, message: bytes) -> int:
        found: Any = self._stamp(keys=[f"{_ENDED}:stamp"], args=[stamps, _ENDED, message, self._latest])
        first = int(found)
        self._latest = max(self._latest, first + stamps - 1)
        return first

    def cancel(self, worker: str, op_id: str) -> None:
        with reaching():
            self._redis.publish(_WORKERS, _encode(ToWorker(worker, Cancel(op_id))))

    def drawn(self, drawn: Drawn) -> None:
        """Send streamed tokens to those who read them, and keep them for those who begin later."""
        part = _encode(drawn)
        with reaching():
            pipe = self._redis.pipeline()
            pipe.rpush(f"{_DRAWN}:{drawn.op_id}", part)
            pipe.expire(f"{_DRAWN}:{drawn.op_id}", DRAWN_LASTS_S)
            pipe.publish(_DRAWN, part)
            pipe.execute()

    def drawn_before(self, op_id: str) -> list[Drawn]:
        with reaching():
            parts = cast("list[bytes]", self._redis.lrange(f"{_DRAWN}:{op_id}", 0, -1))
        return [_drawn.decode(part) for part in parts]

    def accepted(self, notes: Sequence[Accepted]) -> None:
        with reaching():
            pipe = self._redis.pipeline()
            pipe.rpush(_ACCEPTED, *map(_encode, notes))
            pipe.ltrim(_ACCEPTED, -MOST_ACCEPTED, -1)
            pipe.execute()

    def next_accepted(self, timeout_s: float) -> list[Accepted]:
        """All messages that wait, or the first that comes. Only the leader may call this: messages are taken off."""
        with reaching():
            return [_accepted.decode(note) for note in pop_all(self._reader, _ACCEPTED, MOST_AT_ONCE, timeout_s)]

    def count(self, counts: Mapping[str, float], generator: str = "") -> None:
        """Add to the counts of all generators, and to those of this one."""
        with reaching():
            pipe = self._redis.pipeline(transaction=False)
            for name, number in counts.items():
                pipe.hincrbyfloat(_GENERATORS, name, number)
                if generator:
                    pipe.hincrbyfloat(f"{_GENERATORS}:{generator}", name, number)
            if generator:
                pipe.expire(f"{_GENERATORS}:{generator}", SHOWN_S)
                pipe.zadd(_WORKED, {generator: time.time()})
            pipe.execute()

    def generators(self) -> dict[str, float]:
        with reaching():
            counts = cast("dict[bytes, bytes]", self._redis.hgetall(_GENERATORS))
            return {name.decode(): float(number) for name, number in counts.items()}

    def each_generator(self) -> dict[str, dict[str, float]]:
        """By name: the counts of each generator that has worked within SHOWN_S."""
        with reaching():
            self._redis.zremrangebyscore(_WORKED, "-inf", time.time() - SHOWN_S)
            names = [name.decode() for name in cast("list[bytes]", self._redis.zrevrange(_WORKED, 0, MOST_SHOWN - 1))]
            pipe = self._redis.pipeline(transaction=False)
            for name in names:
                pipe.hgetall(f"{_GENERATORS}:{name}")
            found: list[dict[bytes, bytes]] = pipe.execute()
        return {
            name: {count.decode(): float(number) for count, number in counts.items()}
            for name, counts in zip(names, found, strict=True)
        }

    def close(self) -> None:
        self._redis.close()
        self._reader.close()


class Listener(threading.Thread):
    """Hears channels, and gives each message to its channel's function. `on_gap` is called whenever something may have
    been missed: at the start, after Redis was away, and when a message of another version cannot be read. `beat` is
    called about once a second."""

    def __init__(
        self,
        url: str,
        channels: Mapping[str, Callable[[bytes], None]],
        on_gap: Callable[[], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=f"listener {' '.join(channels)}", daemon=True)
        self._url, self._channels = url, {name.encode(): heard for name, heard in channels.items()}
        self._on_gap, self._beat = on_gap, beat
        self._over = threading.Event()
        self.connected = threading.Event()

    @classmethod
    def of_ends(cls, url: str, on_ends: Callable[[Sequence[Ended], int], None], on_gap: Callable[[], None]) -> Listener:
        """`on_ends` gets the operations of one message and the stamp of the first; each further one has a stamp one
        higher."""

        def on_message(data: bytes) -> None:
            last, _, body = data.partition(b" ")
            ends = _ended.decode(body)
            on_ends(ends, int(last) - len(ends) + 1)

        return cls(url, {_ENDED: on_message}, on_gap)

    @classmethod
    def of_streams(cls, url: str, on_drawn: Callable[[Drawn], None], on_gap: Callable[[], None]) -> Listener:
        """`on_drawn` gets the tokens of streamed samples."""
        return cls(url, {_DRAWN: lambda data: on_drawn(_drawn.decode(data))}, on_gap)

    @classmethod
    def of_workers(
        cls,
        url: str,
        worker: str,
        on_message: Callable[[Cancel | PolicyMoved], None],
        on_gap: Callable[[], None],
        beat: Callable[[], None],
    ) -> Listener:
        """Messages for `worker`."""

        def mine(data: bytes) -> None:
            told = _to_worker.decode(data)
            if told.worker in ("", worker):
                on_message(told.message)

        def moved(data: bytes) -> None:
            for move in _moves.decode(data):
                on_message(move)

        return cls(url, {_WORKERS: mine, POLICIES: moved}, on_gap, beat)

    def run(self) -> None:
        while not self._over.is_set():
            client = blocking(self._url)
            try:
                with client.pubsub(ignore_subscribe_messages=False) as channel:  # type: ignore[no-untyped-call]
                    channel.subscribe(*self._channels)
                    self._listen(channel)
            except (redis.RedisError, OSError) as error:
                away = QueueUnreachable(f"Redis cannot be reached: {error}")
                log.warning("%s", away, exc_info=away)
            finally:
                self.connected.clear()
                client.close()
            self._over.wait(RETRY_S)

    def _listen(self, channel: Any) -> None:
        while not self._over.is_set():
            message = channel.get_message(timeout=1.0)
            if message is None:
                channel.ping()
            elif message["type"] == "subscribe" and message["data"] == len(self._channels):
                self.connected.set()
                self._on_gap()
            elif message["type"] == "message":
                self._hear(message)
            self._beat()

    def _hear(self, message: Mapping[str, Any]) -> None:
        try:
            self._channels[message["channel"]](message["data"])
        except ValueError as error:  # msgspec's errors are ValueErrors, too
            log.warning("a message on %s cannot be read: %s", message["channel"].decode(), error)
            self._on_gap()

    def stop(self) -> None:
        self._over.set()
