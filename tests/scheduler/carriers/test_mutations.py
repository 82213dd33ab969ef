"""The random scripts of test_properties would notice if the queue in Redis were wrong: each of these faults, put into
its Lua, makes it say something else than the queue in one process."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from scheduler.carriers import redis_queue
from scheduler.carriers.local_queue import LocalQueue
from scheduler.carriers.redis_queue import RedisQueue
from tests.scheduler.carriers.conftest import Clock
from tests.scheduler.carriers.test_properties import calls, played

FAULTS = {
    "an answer with any epoch counts": ("or held[2] ~= epoch then return 0", "then return 0"),
    "a decline with any epoch counts": ("or held[2] ~= epoch then return false", "then return false"),
    "served without weights": ("start + cost / weight(inner)", "start + cost"),
    "corrected without weights": ("local shift = tokens / weight(inner)", "local shift = tokens"),
    "idling earns credit": ("math.max(get(node, \"v\"), get(inner, \"f\"))", "get(inner, \"f\")"),
    "what a flow owes is forgotten": ("math.max(get(node, \"v\"), get(inner, \"f\"))", "get(node, \"v\")"),
    "lost work stays charged": ("correct(facts[1], -number(facts[2]))", ""),
    "items are never given up": (">= LIVES then", ">= 1000 then"),
    "slots are not counted": ("left = left - size", "left = left - 1"),
    "a worker gets again what it declined": ('key("d", id), worker) == 0 then\n', 'key("d", id), worker) >= 0 then\n'),
    "what is removed stays": ('  withdraw(id)\n  redis.call("DEL", item, key("d", id))\n  return 1', "  return 1"),
}  # fmt: skip


@pytest.fixture(scope="module")
def mutant(redis_url: str) -> Iterator[RedisQueue]:
    queue = RedisQueue(redis_url)
    yield queue
    queue.close()


def differing(mutant: RedisQueue, source: str) -> None:
    """Find a script of calls that `source` answers otherwise. Raises NoSuchExample."""
    mutant._script = mutant._redis.register_script(source)

    def differs(script: list) -> bool:  # type: ignore[type-arg]
        here, there = Clock(), Clock()
        mutant._prefix, mutant._clock = f"{{weft:{uuid.uuid4().hex}}}:", there
        try:
            return played(LocalQueue(here), here, script) != played(mutant, there, script)
        except Exception:  # a fault may leave the queue in no state at all
            return True

    quick = settings(max_examples=100, database=None, derandomize=True, phases=[Phase.generate], deadline=None)
    find(calls, differs, settings=settings(quick, suppress_health_check=list(HealthCheck)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_script_is_noticed(mutant: RedisQueue, fault: str) -> None:
    right, wrong = FAULTS[fault]
    assert redis_queue._SOURCE.count(right) == 1, "the script has changed: so must this fault"
    differing(mutant, redis_queue._SOURCE.replace(right, wrong))


def test_without_a_fault_nothing_is_noticed(mutant: RedisQueue) -> None:
    with pytest.raises(NoSuchExample):
        differing(mutant, redis_queue._SOURCE)
