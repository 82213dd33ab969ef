"""How policies move, over Redis: from the replica that leads to every generator, in the order of each run.

The leader alone writes. It knows the policies of its runs from the database (`scheduler.versions`) and from what it
settles, keeps the newest of each run in Redis, and tells it to whoever listens. The script stores before it tells: a
generator that leases a sample reads the newest policy with it, and hears what comes later. A message carries all that
is known of a run, and the number of the operation that moved it last; nobody goes back to an earlier one. What Redis
has lost, or could not be told, is told again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from scheduler.carriers.clients import pooled
from scheduler.carriers.news import WORKERS, ToWorker
from scheduler.carriers.redis_queue import reaching
from scheduler.journal import Journal
from scheduler.messages import PolicyMoved, SampleOp
from scheduler.operations import Operation

_KEY = "{weft:policies}"
#: The leader looks this often whether Redis has lost something.
LOOK_AGAIN_S = 2.0

#: Stores ARGV[4] as the policy of run ARGV[1] and tells ARGV[5] on ARGV[2], unless that of a later operation than
#: ARGV[3] is there.
_MOVE = """
local known = redis.call("HGET", KEYS[1], ARGV[1])
if known and tonumber(string.match(known, "^-?%d+")) > tonumber(ARGV[3]) then return 0 end
redis.call("HSET", KEYS[1], ARGV[1], ARGV[3] .. " " .. ARGV[4])
redis.call("PUBLISH", ARGV[2], ARGV[5])
return 1
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PolicyMoved).decode


class PolicyBoard:
    """The newest policy of each run, in Redis. Callable from any thread; raises QueueUnreachable."""

    def __init__(self, url: str) -> None:
        self._redis = pooled(url)
        self._move = self._redis.register_script(_MOVE)

    def tell(self, moved: PolicyMoved) -> None:
        message = _encode(ToWorker("", moved))
        with reaching():
            self._move(keys=[_KEY], args=[moved.run_id, WORKERS, moved.seq, _encode(moved), message])

    def known(self, run_ids: Iterable[str]) -> dict[str, PolicyMoved]:
        asked = sorted(run_ids)
        if not asked:
            return {}
        with reaching():
            found: list[Any] = self._redis.hmget(_KEY, asked)
        return {run_id: _decode(value.partition(b" ")[2]) for run_id, value in zip(asked, found, strict=True) if value}

    def forget(self, run_ids: Iterable[str]) -> None:
        with reaching():
            self._redis.hdel(_KEY, *run_ids)

    def close(self) -> None:
        self._redis.close()


class PolicyDesk:
    """The leader's end: a desk of its journal. `run` calls what blocks."""

    worker = "generator"
    attached = True

    def __init__(self, journal: Journal, board: PolicyBoard, run: Callable[..., Awaitable[Any]]) -> None:
        self._journal, self._board, self._run = journal, board, run
        self._versions: dict[str, tuple[int, int]] = {}  # by run: (operation, version)
        self._weights: dict[str, tuple[int, str]] = {}  # by run: (operation, what inflight samplers are on)
        self._untold: set[str] = set()
        self._moves = asyncio.Event()
        journal.desks.append(self)

    def wake(self) -> None:
        """Generators come to the shared queue by themselves."""

    def cancel(self, op: Operation) -> None:
        """Replicas cancel samples."""

    def policy_moved(self, moved: PolicyMoved) -> None:
        """Two operations of a run may be settled in either order: the later one counts."""
        run_id, none = moved.run_id, (-1, 0)
        self._versions[run_id] = max(self._versions.get(run_id, none), (moved.seq, moved.version))
        if moved.adapter_ref:
            self._weights[run_id] = max(self._weights.get(run_id, (-1, "")), (moved.seq, moved.adapter_ref))
        self._untold.add(run_id)
        self._moves.set()

    async def tell(self) -> None:
        """Tell what has moved, when it has; now and then, what Redis does not know."""
        try:
            await asyncio.wait_for(self._moves.wait(), LOOK_AGAIN_S)
        except TimeoutError:
            await self._look()
        self._moves.clear()
        while self._untold:
            moved = self._newest(next(iter(self._untold)))
            await self._run(self._board.tell, moved)
            if moved == self._newest(moved.run_id):
                self._untold.discard(moved.run_id)

    async def _look(self) -> None:
        if over := self._versions.keys() - self._journal.runs.keys():
            await self._run(self._board.forget, over)
            for run_id in over:
                del self._versions[run_id]
                self._weights.pop(run_id, None)
                self._untold.discard(run_id)
        known = await self._run(self._board.known, list(self._versions))
        self._untold |= {run_id for run_id in self._versions if known.get(run_id) != self._newest(run_id)}

    def _newest(self, run_id: str) -> PolicyMoved:
        seq, version = self._versions[run_id]
        return PolicyMoved(run_id, version, self._weights.get(run_id, (-1, ""))[1], seq)


class Followed:
    """A generator's end: the runs whose samples it holds, and what it was told of them. Lives in one thread."""

    def __init__(self) -> None:
        self._runs: dict[str, str] = {}  # by sample
        self._told: dict[str, PolicyMoved] = {}  # by run

    @property
    def runs(self) -> set[str]:
        return set(self._runs.values())

    def hold(self, op: SampleOp, newest: PolicyMoved | None) -> SampleOp:
        """The sample as it is to be run: under the newest policy of its run."""
        if not op.run_id:
            return op
        self._runs[op.op_id] = op.run_id
        if newest is not None:
            self.news(newest)
        moved = self._told.get(op.run_id)
        if moved is None:
            return op
        ref = moved.adapter_ref if op.inflight and moved.adapter_ref else op.adapter_ref
        return msgspec.structs.replace(op, adapter_ref=ref, version=moved.version)

    def drop(self, op_id: str) -> None:
        run_id = self._runs.pop(op_id, None)
        if run_id is not None and run_id not in self._runs.values():
            self._told.pop(run_id, None)

    def news(self, moved: PolicyMoved) -> bool:
        """Whether this is to be told: it is of a run that is followed, and newer than what was."""
        told = self._told.get(moved.run_id)
        if moved.run_id not in self.runs or (told is not None and (told == moved or told.seq > moved.seq)):
            return False
        self._told[moved.run_id] = moved
        return True
