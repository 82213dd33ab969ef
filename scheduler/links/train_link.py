"""The link between a trainer and the replica that leads (`scheduler.cluster.term`), over Redis, under the same messages
as over a socket pair.

A trainer finds the leader's token, makes up a link of its own and joins. From then on `up:<link>` and `down:<link>`
carry the messages, each once and in order (`scheduler.links.mailbox`); `alive:<link>` is the trainer's sign of life and
lasts for LEASE_S. Either end is gone for the other when its sign is: the trainer then gets EOFError and forgets its
runs, the leader rebuilds them elsewhere. A link is never taken up again, so what a trainer sends after it was given up
reaches nobody.

A killed trainer is noticed sooner than that: its sign names a connection that it holds open, which the kernel closes
with the process, and never because the machine is busy.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import redis

from scheduler.links.contract import QueueUnreachable
from scheduler.links.large_results import LargeResult, pack, parcel_of, whole
from scheduler.links.leading import LEADER, TRAINERS, Looked
from scheduler.links.mailbox import LEFT_OVER_S, Numbered, Reader, append
from scheduler.links.messages import Done, PassOver, ToTrainer
from scheduler.links.redis_clients import LONGEST_BLOCK_S, blocking, held, pooled
from scheduler.links.redis_queue import reaching
from scheduler.links.sample_link import BEAT_S, LEASE_S, worker_name
from store.blobs.contract import Blobs, is_lasting

log = logging.getLogger(__name__)

#: A trainer is dead if its connection is closed and for this long it has not named another one.
CLOSED_S = 2.0
#: How often the leader checks whether a trainer that sends messages is alive; a silent one is checked each time.
LOOK_S = 0.25
#: The least time, in seconds, between two sends of finished operations: quick ones go together.
APART_S = 0.004

_encode = msgspec.msgpack.Encoder().encode
_to_trainer = msgspec.msgpack.Decoder(ToTrainer)


def _key(kind: str, name: str) -> str:
    return f"{TRAINERS}{kind}:{name}"


class TrainerLink:
    """The trainer's end. `stopped` ends the search for a leader."""

    def __init__(self, url: str, blobs: Blobs, stopped: Callable[[], bool] = lambda: False) -> None:
        self._blobs = blobs
        self._redis, self._reader, self._held = pooled(url), blocking(url), held(url)
        self._over = threading.Event()
        self._telling, self._untold, self._parcels = threading.Lock(), list[Any](), list[Numbered]()
        self._told_at, self._late = -math.inf, threading.Event()
        self._link, self._numbers = worker_name("trainer"), count(1)
        self._mail, self._unread = Reader(self._reader, _key("down", self._link)), deque[bytes]()
        self._looked = Looked()
        self._leader = self._join(stopped)
        for work in (self._beat, self._tell_late):
            threading.Thread(target=work, name="trainer beats", daemon=True).start()

    def send(self, *messages: Any) -> None:
        """Send messages, in order. The end of a pass is held back until the next message (mostly the next pull); `Done`
        for at most APART_S."""
        with self._telling:
            self._untold += messages
            if isinstance(messages[-1], Done) and time.monotonic() < self._told_at + APART_S:
                self._late.set()
            elif not isinstance(messages[-1], PassOver):
                self._tell()

    def _tell(self) -> None:
        """Send all held-back messages, trying for as long as it takes."""
        while self._untold and not self._over.is_set():
            with suppress(QueueUnreachable):
                self._push()
                return
            self._over.wait(0.2)
        if self._untold:
            raise EOFError("the leader is gone")

    def _push(self) -> None:
        for message in self._untold[len(self._parcels) :]:
            self._parcels.append((next(self._numbers), pack(message, self._blobs)))
        with reaching():
            append(self._redis, _key("up", self._link), self._parcels)
        self._untold, self._parcels, self._told_at = [], [], time.monotonic()

    def _tell_late(self) -> None:
        while not self._over.is_set():
            if self._late.wait(BEAT_S):
                self._over.wait(APART_S)
                self._late.clear()
                with suppress(EOFError), self._telling:  # whoever sends next gets the error
                    self._tell()

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message, or None if none comes within `timeout_s`. Raises EOFError if the leader is gone."""
        deadline = time.monotonic() + (1e9 if timeout_s is None else timeout_s)
        with self._telling:
            self._tell()
        while not self._over.is_set():
            if self._unread:
                return _to_trainer.decode(self._unread.popleft())
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                with reaching():
                    self._unread.extend(self._mail.next(max(0.05, min(left, BEAT_S))))
            except QueueUnreachable:
                self._over.wait(min(left, 0.2))
        raise EOFError("the leader is gone")

    def close(self) -> None:
        """Say goodbye: the leader reads what was sent, and need not wait for the lease to end."""
        over = self._over.is_set()
        self._over.set()
        with suppress(QueueUnreachable), self._telling, reaching():
            if self._untold and not over:
                self._push()
            self._redis.expire(_key("up", self._link), LEFT_OVER_S)
            self._redis.delete(_key("alive", self._link))
        self._redis.close()
        self._reader.close()

    def _join(self, stopped: Callable[[], bool]) -> bytes:
        while not stopped():
            try:
                with reaching():
                    leader: Any = self._redis.get(LEADER)
                    self._looked.found(bool(leader))
                    if leader:
                        self._redis.set(_key("alive", self._link), self._held.client_id(), px=int(LEASE_S * 1000))
                        self._redis.rpush(_key("joining", leader.decode()), self._link)
                        return bytes(leader)
            except QueueUnreachable as error:
                self._looked.unreachable(error)
            time.sleep(BEAT_S / 4)
        raise EOFError("told to stop before there was a leader")

    def _beat(self) -> None:
        pause_s, lasts_until = BEAT_S, time.monotonic() + LEASE_S
        while not self._over.wait(pause_s):
            pause_s = BEAT_S / 5  # short, until Redis answers: after a lost connection the new one must be named soon
            now = time.monotonic()
            try:
                with reaching():
                    sign = self._held.client_id()
                    alive = self._held.set(_key("alive", self._link), sign, px=int(LEASE_S * 1000), xx=True)
                    if not alive or self._held.get(LEADER) != self._leader:
                        self._over.set()
                self._looked.found(True)
                pause_s, lasts_until = BEAT_S, now + LEASE_S
            except QueueUnreachable as error:
                self._looked.unreachable(error)
                if time.monotonic() > lasts_until:  # the sign has lapsed: the leader no longer reads what is sent here
                    self._over.set()
        self._held.close()


class LeaderLink:
    """The leader's end, in its event loop (a `scheduler.links.sockets.Link`). Blocking calls run in threads of its own,
    because there may be any number of trainers: one thread waits for messages of the trainer, one sends."""

    def __init__(self, url: str, link: str, blobs: Blobs) -> None:
        self.name = link
        self._blobs, self._threads = blobs, ThreadPoolExecutor(2, "trainer link")
        self._redis, self._reader = pooled(url), blocking(url)
        self._numbers, self._mail = count(1), Reader(self._reader, _key("up", link))
        self._heard: asyncio.Queue[tuple[list[LargeResult], bool] | Exception] = asyncio.Queue()
        self._outbox, self._sending, self._telling = list[Numbered](), False, threading.Lock()
        self._closed = threading.Event()
        self._was_alive, self._look_at = False, 0.0  # when the trainer is next checked
        self._sign: bytes | None = None  # the trainer's last sign, and since when its connection is closed
        self._closed_since: float | None = None

    def send(self, message: msgspec.Struct) -> None:
        with self._telling:
            self._outbox.append((next(self._numbers), _encode(message)))
            if not self._sending and not self._closed.is_set():
                self._sending = True
                self._threads.submit(self._send_all)

    async def messages(self) -> AsyncIterator[Any]:
        """Messages from the trainer, until it is gone and all are read."""
        listening = threading.Thread(target=self._listen, args=(asyncio.get_running_loop(),), name="trainer link")
        listening.daemon = True
        listening.start()
        while True:
            heard = await self._heard.get()
            if isinstance(heard, Exception):
                raise heard
            parcels, was_alive = heard
            if not parcels and not was_alive:
                return
            for parcel in parcels:
                message, ref = await self._whole(parcel)
                yield message
                if ref:
                    await self._run(self._delete, ref)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read messages until the trainer is gone or `close` is called; all that are there wake the event loop once."""
        going_on = True
        while going_on and not self._closed.is_set():
            heard: tuple[list[LargeResult], bool] | Exception
            try:
                heard = parcels, was_alive = self._next()
                going_on = bool(parcels or was_alive)
                if was_alive and not parcels:
                    continue
            except QueueUnreachable:
                self._closed.wait(BEAT_S)
                continue
            except Exception as error:
                heard, going_on = error, False
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._heard.put_nowait, heard)

    async def _whole(self, parcel: LargeResult) -> tuple[Any, str]:
        if not parcel.payload_ref:
            return parcel.message, ""
        while True:
            try:
                return await self._run(whole, parcel, self._blobs)  # type: ignore[no-any-return]
            except OSError as error:
                if is_lasting(error):
                    raise
                log.warning("a result cannot be read: %s; again in %.1f s", error, BEAT_S)
            await asyncio.sleep(BEAT_S)

    def _delete(self, ref: str) -> None:
        with suppress(OSError):  # the reaper deletes it later
            self._blobs.delete(ref)

    def hang_up(self) -> None:
        self._threads.submit(self._give_up)

    def _give_up(self) -> None:
        with suppress(QueueUnreachable), reaching():
            self._redis.delete(_key("alive", self.name))

    def close(self) -> None:
        self._closed.set()
        with suppress(QueueUnreachable), reaching():
            self._redis.delete(*(_key(kind, self.name) for kind in ("up", "down", "alive")))
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._redis.close()
        self._reader.close()

    def _send_all(self) -> None:
        """Send all waiting messages, trying for as long as it takes."""
        while True:
            with self._telling:
                messages, self._outbox = self._outbox, []
                self._sending = bool(messages) and not self._closed.is_set()
                if not self._sending:
                    return
            while not self._closed.is_set():
                with suppress(QueueUnreachable), reaching():
                    append(self._redis, _key("down", self.name), messages)
                    break
                self._closed.wait(BEAT_S)

    def _alive(self) -> bool:
        with reaching():
            sign: Any = self._redis.get(_key("alive", self.name))
            if sign is None:
                return False
            if sign != self._sign or self._is_open(sign):
                self._sign, self._closed_since = sign, None
                return True
        now = time.monotonic()
        self._closed_since = self._closed_since or now
        return now - self._closed_since < CLOSED_S

    def _is_open(self, sign: bytes) -> bool:
        """Whether the connection named by the sign is open. True if Redis cannot tell: then the lease decides."""
        try:
            return bool(self._redis.client_list(client_id=[int(sign)]))
        except redis.ResponseError:
            return True

    def _next(self) -> tuple[list[LargeResult], bool]:
        """New messages of the trainer, after a short wait for some; and whether the trainer was alive before that wait,
        so that the messages of a dead one are still read to the end."""
        if not self._was_alive or time.monotonic() >= self._look_at:
            self._was_alive, self._look_at = self._alive(), time.monotonic() + LOOK_S
        with reaching():
            found = self._mail.next(BEAT_S if self._was_alive else 0.0)
        if not found:
            self._look_at = 0.0
        return [parcel_of(one) for one in found], self._was_alive

    async def _run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


class Joining:
    """For the leader: announces who leads, and lists the trainers that want to join."""

    def __init__(self, url: str, token: str) -> None:
        self._redis, self._reader = pooled(url), blocking(url)
        self._token = token
        self._joined: dict[str, None] = {}  # in order; a trainer that asks twice joins once

    def lead(self, ttl_s: float) -> None:
        with reaching():
            self._redis.set(LEADER, self._token, px=int(ttl_s * 1000))

    def next(self, timeout_s: float) -> str | None:
        """The link of a trainer that has joined, and is alive. It stays on the list until the next call: the reply to
        this one may be lost."""
        key = _key("joining", self._token)
        with reaching():
            if self._joined:
                self._redis.lrem(key, 0, next(reversed(self._joined)))
            found: Any = self._reader.blmove(key, key, min(timeout_s, LONGEST_BLOCK_S), "LEFT", "LEFT")  # type: ignore[arg-type]
            if not found:
                return None
            link = found.decode()
            alive, again = bool(self._redis.exists(_key("alive", link))), link in self._joined
        self._joined.pop(link, None)
        self._joined[link] = None
        return link if alive and not again else None

    def close(self) -> None:
        with suppress(QueueUnreachable), reaching():
            if self._redis.get(LEADER) == self._token.encode():
                self._redis.delete(LEADER)
            self._redis.delete(_key("joining", self._token))
        self._redis.close()
        self._reader.close()
