"""How policies move, over Redis: from the replica that leads to every generator, in the order of each run.

The leader alone writes. It knows the policies of its runs from the database (`scheduler.journal.samples.versions`) and
from what it settles, keeps the newest of each run in Redis, and publishes it. The script stores before it tells: a
generator that leases a sample reads the newest policy with it, and hears what comes later. A message carries the whole
policy of a run, and the number of the operation that moved it last; an earlier one is ignored. Policies that Redis has
lost, or could not be told, are told again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from scheduler.links.broadcasts import POLICIES
from scheduler.links.messages import PolicyMoved, SampleOp
from scheduler.links.redis_clients import pooled
from scheduler.links.redis_queue import reaching

_KEY = "{weft:policies}"

#: For each move (its run, the number of its operation, the policy): stores the policy, unless that of a later operation
#: is stored, and publishes all that it has stored as one MessagePack array on ARGV[1].
_MOVE = """
local told = {}
for at = 2, #ARGV, 3 do
  local run, seq, policy = unpack(ARGV, at, at + 2)
  local known = redis.call("HGET", KEYS[1], run)
  if not known or tonumber(string.match(known, "^-?%d+")) <= tonumber(seq) then
    redis.call("HSET", KEYS[1], run, seq .. " " .. policy)
    told[#told + 1] = policy
  end
end
if #told > 0 then
  local head = string.char(220, math.floor(#told / 256), #told % 256)
  redis.call("PUBLISH", ARGV[1], head .. table.concat(told))
end
return #told
"""
#: How many moves are published at once.
MOST_MOVES = 256

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PolicyMoved).decode


class PolicyBoard:
    """The newest policy of each run, in Redis. Callable from any thread; raises QueueUnreachable."""

    def __init__(self, url: str) -> None:
        self._redis = pooled(url)
        self._move = self._redis.register_script(_MOVE)

    def tell(self, moves: Sequence[PolicyMoved]) -> None:
        """Tell up to MOST_MOVES moves, of different runs."""
        arguments: list[str | int | bytes] = [POLICIES]
        for one in moves:
            arguments += (one.run_id, one.seq, _encode(one))
        with reaching():
            self._move(keys=[_KEY], args=arguments)

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


class Followed:
    """A generator's end: the runs that its samples follow, and their latest policies. Lives in one thread."""

    def __init__(self) -> None:
        self._runs: dict[str, str] = {}  # by sample: its run
        self._told: dict[str, PolicyMoved] = {}  # by run: its latest policy

    @property
    def runs(self) -> set[str]:
        return set(self._runs.values())

    def hold(self, op: SampleOp, newest: PolicyMoved | None) -> SampleOp:
        """The sample with the newest policy of its run; from now on the run is followed."""
        if not op.run_id:
            return op
        self._runs[op.op_id] = op.run_id
        if newest is not None:
            self.hear(newest)
        moved = self._told.get(op.run_id)
        if moved is None:
            return op
        ref = moved.adapter_ref if op.inflight and moved.adapter_ref else op.adapter_ref
        return msgspec.structs.replace(op, adapter_ref=ref, version=moved.version)

    def drop(self, op_id: str) -> None:
        run_id = self._runs.pop(op_id, None)
        if run_id is not None and run_id not in self._runs.values():
            self._told.pop(run_id, None)

    def hear(self, moved: PolicyMoved) -> bool:
        """Remember a move. Returns whether it matters: its run is followed, and it is newer than the last one."""
        told = self._told.get(moved.run_id)
        if moved.run_id not in self.runs or (told is not None and (told == moved or told.seq > moved.seq)):
            return False
        self._told[moved.run_id] = moved
        return True
