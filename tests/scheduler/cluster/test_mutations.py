"""The random scripts of test_properties would notice a wrong queue in Redis: each of these faults, put into its Lua,
makes it answer differently from the queue in one process."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from scheduler.links import redis_queue
from scheduler.links.redis_queue import Library, RedisQueue
from scheduler.order.local_queue import LocalQueue
from tests.scheduler.cluster.conftest import Clock
from tests.scheduler.cluster.test_properties import calls, calls_with_room, played

FAULTS = {
    "an answer with any epoch counts": ("or held[2] ~= epoch then return 0", "then return 0"),
    "a decline with any epoch counts": (
        'HMGET", item, "worker", "epoch", "path")\n  if not held[1] or held[2] ~= epoch then return false',
        'HMGET", item, "worker", "epoch", "path")\n  if not held[1] then return false',
    ),
    "a loss with any epoch counts": (
        'HMGET", key("i", id), "worker", "epoch")\n  if not held[1] or held[2] ~= epoch then return false',
        'HMGET", key("i", id), "worker", "epoch")\n  if not held[1] then return false',
    ),
    "served without weights": ("start + cost / weight(inner)", "start + cost"),
    "corrected without weights": ("local shift = tokens / weight(inner)", "local shift = tokens"),
    "idling earns credit": ("math.max(load(node).v, load(inner).f)", "load(inner).f"),
    "what a flow owes is forgotten": ("math.max(load(node).v, load(inner).f)", "load(node).v"),
    "a call forgets its nodes": ("write_nodes()\n  write_the_rest", "write_the_rest"),
    "an empty flow stays ready": ("load(inner).e = false\n    forget", "forget"),
    "order among equals begins anew": ('P .. "arrivals", string', 'P .. "a", string'),
    "lost work stays charged": ("correct(facts[1], -number(facts[2]))", ""),
    "items are never given up": (">= LIVES then", ">= 1000 then"),
    "slots are not counted": ("left = left - size", "left = left - 1"),
    "newcomers of whom something is in hand": ("flow_of(next_path(model))) == 1", "flow_of(next_path(model))) == 2"),
    "a flow is in hand for ever": ("flow_of(path), -1) < 1", "flow_of(path), -1) < -9"),
    "newcomers though another has room": ("if other ~= worker and room > 0 and serves", "if false and serves"),
    "more newcomers than are yielded to": ("yields = yields - size", ""),
    "what is removed stays": ('  withdraw(id)\n  redis.call("DEL", item, key("d", id))\n  return 1', "  return 1"),
}  # fmt: skip

#: Noticed if workers have room.
WITH_ROOM = {
    "a worker gets again what it declined": ("worker) == 0 then found", "worker) >= 0 then found"),
    "left to others for ever": ("or number(till) < number(now)", ""),
    "left to others for no time": ("or number(till) < number(now)", "or true"),
    "left to a much fuller one": ("room > 0 and full < least and", "room > 0 and"),
    "left to one that serves other models": ("holds(other, adapter) and serves(other, model)", "holds(other, adapter)"),
    "left though it is held here": ('adapter ~= "" and not holds(worker, adapter)', 'adapter ~= ""'),
    "what is left takes no room": ('redis.call("HINCRBY", P .. "room"', 'redis.call("HINCRBY", P .. "r"'),
}  # fmt: skip


@pytest.fixture(scope="module")
def mutant(redis_url: str) -> Iterator[RedisQueue]:
    queue = RedisQueue(redis_url)
    yield queue
    queue.close()


def differing(mutant: RedisQueue, source: str, scripts: SearchStrategy, most: int = 100) -> None:  # type: ignore[type-arg]
    """Find one among so many scripts that `source` answers differently. Raises NoSuchExample."""
    mutant._script = Library(mutant._redis, source)

    def differs(script: list) -> bool:  # type: ignore[type-arg]
        here, there = Clock(), Clock()
        mutant._prefix, mutant._clock = f"{{weft:{uuid.uuid4().hex}}}:", there
        try:
            return played(LocalQueue(here), here, script) != played(mutant, there, script)
        except Exception:  # a fault may leave the queue in an impossible state
            return True

    quick = settings(max_examples=most, database=None, derandomize=True, phases=[Phase.generate], deadline=None)
    find(scripts, differs, settings=settings(quick, suppress_health_check=list(HealthCheck)))


@pytest.mark.parametrize("fault", FAULTS | WITH_ROOM)
def test_a_fault_in_the_script_is_noticed(mutant: RedisQueue, fault: str) -> None:
    right, wrong = (FAULTS | WITH_ROOM)[fault]
    assert redis_queue._SOURCE.count(right) == 1, "the script has changed: so must this fault"
    scripts = calls_with_room if fault in WITH_ROOM else calls
    differing(mutant, redis_queue._SOURCE.replace(right, wrong), scripts)


@pytest.mark.parametrize("scripts", [calls, calls_with_room], ids=["calls", "with room"])
def test_without_a_fault_nothing_is_noticed(mutant: RedisQueue, scripts: SearchStrategy) -> None:  # type: ignore[type-arg]
    with pytest.raises(NoSuchExample):
        differing(mutant, redis_queue._SOURCE, scripts, 20)  # more of them: test_properties.py
