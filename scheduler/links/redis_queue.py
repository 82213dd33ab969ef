"""The fair queue carried by Redis: each call is one of a library of Lua (`fair_queue.lua`), so any number of processes
may share it. Callable from any thread; blocks for a network round trip."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, cast

import redis

from scheduler.links.contract import (
    AHEAD_S,
    HEAD_START,
    LEFT_S,
    LIVES,
    MAX_ASIDE,
    REMEMBERED,
    TAKEN_S,
    Answered,
    Expired,
    Item,
    Lease,
    Path,
    QueueUnreachable,
    weights_of,
)
from scheduler.links.leading import LEADER
from scheduler.links.messages import FORM
from scheduler.links.redis_clients import LONGEST_BLOCK_S, Client, blocking, entries_of, pooled

_SEPARATOR = "\x1f"
_SCRIPTS = ("fair_tree.lua", "roster.lua", "fair_queue.lua")  # together they are one library
_CONSTANTS = f"""local LIVES, MAX_ASIDE, LEFT_MS = {LIVES}, {MAX_ASIDE}, {int(LEFT_S * 1000)}
local HEAD_START, REMEMBERED, AHEAD_MS = {HEAD_START}, {REMEMBERED}, {int(AHEAD_S * 1000)}
"""
_SOURCE = _CONSTANTS + "".join(FilePath(__file__).with_name(name).read_text() for name in _SCRIPTS)
_GROUP = "settle"
SAMPLES = f"samples2:{FORM}"
#: How many answers one call hands to a consumer.
BATCH = 128
#: How many calls travel together: Redis does nothing else for the few milliseconds that they take.
MOST_CALLS = 64
#: `ahead` counts up to this.
MOST_AHEAD = 1000

#: Errors, and words in errors, of a Redis that starts, is a replica, has no room in memory or on disk, or is held up by
#: somebody's script.
_AWAY = (redis.BusyLoadingError, redis.ReadOnlyError, redis.OutOfMemoryError)
_AWAY_WORDS = ("BUSY ", "MISCONF ", "NOREPLICAS ", "MASTERDOWN ")


@contextmanager
def reaching() -> Iterator[None]:
    """Raise errors of the network, and of a Redis that takes nothing for now, as QueueUnreachable."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise QueueUnreachable(f"Redis cannot be reached: {error}") from error
    except redis.ResponseError as error:
        if isinstance(error, _AWAY) or any(word in str(error) for word in _AWAY_WORDS):
            raise QueueUnreachable(f"Redis takes nothing for now: {error}") from error
        raise


class Library:
    """A library of Lua functions that Redis keeps. A script's functions would be created anew with every call, which
    costs more than most calls of `fair_queue.lua` themselves.

    `source` registers one function, under the name in place of its LIBRARY. The name is derived from the source, so any
    number of versions may share one Redis. A Redis that does not have the library, or has lost it, gets it with the
    first call.
    """

    def __init__(self, client: Client, source: str) -> None:
        self._client = client
        self._name = f"weft_{hashlib.sha256(source.encode()).hexdigest()[:24]}"
        self._source = f'#!lua name={self._name}\nlocal LIBRARY = "{self._name}"\n{source}'

    def __call__(self, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        try:
            return self._call(keys, args)
        except redis.ResponseError as error:
            if "Function not found" not in str(error):
                raise
        self._load()
        return self._call(keys, args)

    def _call(self, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        return self._client.execute_command("FCALL", self._name, len(keys), *keys, *args)  # type: ignore[no-untyped-call]

    def _load(self) -> None:
        try:
            self._client.function_load(self._source)
        except redis.ResponseError as error:  # another process loaded it first
            if "already exists" not in str(error):
                raise


class RedisQueue:
    """`name` separates queues in one Redis. The name of the samples' queue contains the format numbers of the queue and
    of the messages, so that no version reads what another has written. `clock` is of the server unless a test brings
    its own (seconds)."""

    def __init__(self, url: str, name: str = SAMPLES, clock: Callable[[], float] | None = None) -> None:
        self._prefix = f"{{weft:{name}}}:"
        self._redis = pooled(url)
        self._reader = blocking(url)
        self._script = Library(self._redis, _SOURCE)
        self._clock = clock
        self._longest_wait_s = LONGEST_BLOCK_S
        # by worker: epoch of the latest lease that came here; mostly there is one worker
        self._newest: dict[str, int] = {}

    def push(self, item: Item) -> bool:
        return bool(self._call(*_push(item)))

    def push_all(self, items: Iterable[Item]) -> None:
        self._call_all(map(_push, items))

    def correct(self, path: Path, tokens: int) -> None:
        self._call("correct", _SEPARATOR.join(path), tokens)

    def peek(self, prefix: Path = ()) -> str | None:
        found = self._call("peek", _SEPARATOR.join(prefix))
        return found.decode() if found else None

    def remove(self, item_id: str) -> bool:
        return bool(self._call("remove", item_id))

    def ahead(self, item_id: str) -> int | None:
        found = self._call("ahead", item_id, MOST_AHEAD)
        return None if found is None else int(found)

    def lease(
        self, worker: str, models: Sequence[str], slots: int, ttl_s: float, most: int | None = None, yields: int = 0
    ) -> list[Lease]:
        limit = slots + yields if most is None else most  # every item takes at least one slot
        newest = self._newest.get(worker, 0)
        numbers = (int(ttl_s * 1000), slots, yields, limit)
        leases, again = self._call("lease", worker, newest, self._now(), *numbers, *models)
        if limit > 0:
            self._longest_wait_s = LEFT_S if again else LONGEST_BLOCK_S
        self._newest[worker] = max([newest, *(int(epoch) for *_, epoch in leases)])
        return [
            Lease(item_id.decode(), tuple(path.decode().split(_SEPARATOR)), body, int(epoch))
            for item_id, path, body, epoch in leases
        ]

    def renew(self, worker: str, ttl_s: float) -> bool:
        return bool(self._call("renew", worker, self._now(), int(ttl_s * 1000)))

    def holder(self, item_id: str) -> str | None:
        with reaching():
            found = cast("bytes | None", self._redis.hget(f"{self._prefix}i:{item_id}", "worker"))
        return found.decode() if found else None

    def answer(self, item_id: str, epoch: int, result: bytes) -> bool:
        return bool(self._call("answer", item_id, epoch, result))

    def answer_all(self, answers: Iterable[tuple[str, int, bytes]]) -> None:
        """Call `answer` for each (item, epoch, result)."""
        self._call_all(("answer", *answer) for answer in answers)

    def lose(self, item_id: str, epoch: int) -> bool:
        return bool(self._call("lose", item_id, epoch))

    def decline(self, item_id: str, epoch: int, why: str) -> list[str] | None:
        reasons = self._call("decline", item_id, epoch, why)
        return None if reasons is None else sorted({reason.decode() for reason in reasons})

    def answered(self, consumer: str, timeout_s: float) -> list[Answered]:
        stream = f"{self._prefix}done"
        wait_ms = max(1, int(min(timeout_s, LONGEST_BLOCK_S) * 1000))
        with reaching():
            try:
                late: Any = self._reader.xautoclaim(stream, _GROUP, consumer, int(TAKEN_S * 1000), count=BATCH)
                found = [entry for entry in late[1] if entry[1]]
                if not found:
                    news: Any = self._reader.xreadgroup(_GROUP, consumer, {stream: ">"}, BATCH, wait_ms)
                    found = entries_of(news)
            except redis.ResponseError as error:  # the group was never made, or is gone with everything else
                if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise
                self._make_group(stream)
                return []
        return [
            Answered(
                fields[b"id"].decode(),
                fields[b"result"],
                int(fields[b"cost"]),
                int(fields[b"at"]) / 1000,
                receipt.decode(),
                fields.get(b"op", b""),
            )
            for receipt, fields in found
        ]

    def untaken(self) -> tuple[str, int]:
        """The id of the latest answer that a consumer has taken, and how many have come since; a large number if Redis
        cannot tell."""
        with reaching():
            try:
                groups: Any = self._redis.xinfo_groups(f"{self._prefix}done")
            except redis.ResponseError:  # there is no answer yet
                groups = []
        for one in groups:
            return one["last-delivered-id"].decode(), BATCH + 1 if one["lag"] is None else one["lag"]
        return "", 0

    def forget(self, item_id: str, receipt: str = "") -> None:
        self._call("forget", item_id, receipt)

    def settle(self, settled: Iterable[tuple[str, str, Path, int]]) -> None:
        """For each known item of (item, receipt, path, tokens): `correct` its path by so many tokens, and `forget`
        it."""
        self._call_all(
            ("settle", item_id, receipt, _SEPARATOR.join(path), tokens) for item_id, receipt, path, tokens in settled
        )

    def expire(self) -> Expired:
        back, given_up, declined = self._call("expire", self._now())
        return Expired(
            [item_id.decode() for item_id in back],
            sorted(item_id.decode() for item_id in given_up),
            sorted((item_id.decode(), sorted({why.decode() for why in reasons})) for item_id, reasons in declined),
        )

    def known(self, item_ids: Sequence[str]) -> set[str]:
        with reaching():
            pipe = self._redis.pipeline(transaction=False)
            for item_id in item_ids:
                pipe.exists(f"{self._prefix}i:{item_id}")
            return {item_id for item_id, there in zip(item_ids, pipe.execute(), strict=True) if there}

    def served(self) -> set[str]:
        """The base models that present workers serve."""
        with reaching():
            workers: Any = self._redis.zrange(f"{self._prefix}w", 0, -1)
            found: Any = self._redis.sunion([f"{self._prefix}m:{name.decode()}" for name in workers]) if workers else ()
        return {model.decode() for model in found}

    def is_led(self) -> bool:
        """Whether a server of this version leads."""
        with reaching():
            return bool(self._redis.exists(LEADER))

    def strangers(self) -> list[str]:
        """Present workers that take from queues of other versions, which get nothing from this server."""
        with reaching():
            now: Any = self._redis.time()
            queues = [
                key for key in self._redis.scan_iter("{weft:samples*}:w", 1000) if key != self._prefix.encode() + b"w"
            ]
            there: Any = [self._redis.zrangebyscore(key, now[0] * 1000, "+inf") for key in queues]
        return sorted(name.decode() for names in there for name in names)

    def wait(self, worker: str, models: Sequence[str], timeout_s: float) -> bool:
        """Wait until there may be an item of these models to lease: queued, left to this worker, or no longer left to
        another. Returns whether it was woken. Only for a process's one worker loop."""
        bells = [f"{self._prefix}bell:{worker}", *(f"{self._prefix}b:{model}" for model in models)]
        wait_s, self._longest_wait_s = min(timeout_s, self._longest_wait_s), LONGEST_BLOCK_S
        with reaching():
            return bool(self._reader.blpop(bells, wait_s))

    def close(self) -> None:
        self._redis.close()
        self._reader.close()

    def _make_group(self, stream: str) -> None:
        try:
            self._redis.xgroup_create(stream, _GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def _now(self) -> int | str:
        """The time in milliseconds; "" makes Redis use its own clock."""
        return int(self._clock() * 1000) if self._clock is not None else ""

    def _call(self, name: str, *arguments: Any) -> Any:
        with reaching():
            return self._script(keys=[self._prefix], args=[name, *arguments])

    def _call_all(self, calls: Iterable[Sequence[Any]]) -> None:
        """Make many calls in few round trips, in their order."""
        left = list(calls)
        while left:
            some, left = left[:MOST_CALLS], left[MOST_CALLS:]
            self._call("all", *(part for call in some for part in (len(call), *call)))


def _push(item: Item) -> tuple[Any, ...]:
    path, weights = _SEPARATOR.join(item.path), weights_of(item.path, item.weight)
    joined = _SEPARATOR.join(map(str, weights))
    return "push", item.id, path, joined, max(1, item.cost), item.slots, item.adapter, item.body, item.op
