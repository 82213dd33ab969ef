"""Under random workloads both carriers serve in the same order, keep the fairness bound, and lose or double nothing."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from scheduler.links.contract import LEFT_S, LIVES, Expired, FairQueue, Item
from scheduler.links.redis_queue import RedisQueue
from scheduler.order.local_queue import LocalQueue
from tests.scheduler.cluster.conftest import Clock, Make
from tests.search import examples

quick = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

paths = st.tuples(
    st.sampled_from(["m1", "m2"]),
    st.sampled_from(["x", "y"]),
    st.sampled_from(["interactive", "batch"]),
    st.sampled_from(["1", "2"]),
)
adapters = st.sampled_from(["", "a1", "a2"])
pushes = st.tuples(st.just("push"), paths, st.integers(1, 50), st.integers(1, 5), st.integers(1, 3), adapters)
#: Few adapters and much room, so that workers often hold the adapter that others ask for.
_push_alike = st.tuples(
    st.just("push"), paths, st.just(10), st.just(1), st.integers(1, 2), st.sampled_from(["a1", "a2", "a3"])
)
mosts = st.sampled_from([None, None, None, 0, 1, 2])
yields = st.sampled_from([0, 2])
calls_with_room = st.lists(
    st.one_of(
        _push_alike,
        _push_alike,
        st.tuples(
            *(st.just("lease"), st.sampled_from("AB"), st.integers(1, 12)),
            *(st.sampled_from([True, True, False]), mosts, yields),
        ),
        st.tuples(st.just("lease"), st.sampled_from("AB"), st.just(12), st.just(True), st.none()),
        st.tuples(st.just("answer"), st.integers(0, 50)),
        st.tuples(st.just("decline"), st.integers(0, 50)),
        st.tuples(st.just("wait"), st.sampled_from([1 / 32, 1 / 16, 3])),
        st.just(("expire",)),
    ),
    min_size=30,
    max_size=100,
)
calls = st.lists(
    st.one_of(
        pushes,
        pushes,
        pushes,
        st.tuples(st.just("lease"), st.sampled_from("ABC"), st.integers(0, 4), st.booleans(), mosts, yields),
        st.tuples(st.just("answer"), st.integers(0, 50)),
        st.tuples(st.just("decline"), st.integers(0, 50)),
        st.tuples(st.just("lose"), st.integers(0, 50)),
        st.tuples(st.just("correct"), paths, st.integers(-30, 30)),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("ahead"), st.integers(0, 50)),
        st.tuples(st.just("wait"), st.sampled_from([1 / 32, 1 / 16, 1, 3, 8])),
        st.just(("expire",)),
        st.just(("lapse",)),
    ),
    min_size=20,
    max_size=80,
)


@pytest.fixture
def make_redis(redis_url: str) -> Iterator[Callable[[Clock], RedisQueue]]:
    """Makes empty queues on one Redis, over the same connections."""
    shared = RedisQueue(redis_url)

    def make(clock: Clock) -> RedisQueue:
        shared._prefix, shared._clock = f"{{weft:{uuid.uuid4().hex}}}:", clock
        return shared

    yield make
    shared.close()


def played(queue: FairQueue, clock: Clock, script: list[tuple]) -> list[object]:  # type: ignore[type-arg]
    """The queue's answers to a script of calls."""
    told: list[object] = []
    leases: list[tuple[str, int]] = []
    for number, (name, *arguments) in enumerate(script):
        match name:
            case "push":
                path, cost, weight, slots, adapter = arguments
                item = Item(f"i{number}", path, cost, slots=slots, weight=weight, adapter=adapter)
                told.append(queue.push(item))
            case "lease":
                worker, slots, both, most, *more = arguments
                found = queue.lease(worker, ["m1", "m2"] if both else ["m2"], slots, 5, most, *more)
                leases += [(lease.id, lease.epoch) for lease in found]
                told.append([(lease.id, lease.path) for lease in found])
            case "answer" if leases:
                told.append(queue.answer(*leases[arguments[0] % len(leases)], b""))  # type: ignore[call-arg]
            case "lose" if leases:
                told.append(queue.lose(*leases[arguments[0] % len(leases)]))
            case "decline" if leases:
                told.append(queue.decline(*leases[arguments[0] % len(leases)], "no"))  # type: ignore[call-arg]
            case "correct":
                queue.correct(*arguments)
            case "remove" | "ahead":
                told.append(getattr(queue, name)(f"i{arguments[0]}"))
            case "wait":
                clock.now_s += arguments[0]
            case "expire":
                told.append(queue.expire())
            case "lapse":  # all workers are silent for too long
                clock.now_s += 6
                told.append(queue.expire())
        told.append(queue.peek())
    clock.now_s += LEFT_S + 1
    while found := queue.lease("last", ["m1", "m2"], 1, 1e6):
        told.append(found[0].id)
    return told


#: A correction that leaves the clock where it is, and so moves no other flow.
_corrected_twice = [
    ("push", ("m2", "y", "interactive", "1"), 42, 5, 2, ""),
    ("push", ("m2", "y", "batch", "1"), 1, 4, 3, ""),
    ("lease", "A", 4, False, None),
    ("lapse",),
    ("push", ("m2", "x", "batch", "2"), 27, 5, 3, ""),
    ("correct", ("m2", "y", "interactive", "2"), 22),
    ("correct", ("m2", "x", "batch", "1"), 7),
]


@settings(quick, max_examples=examples(100))
@example(script=_corrected_twice)
@given(script=calls | calls_with_room)
def test_both_carriers_say_the_same_to_any_calls(make_redis: Callable[[Clock], RedisQueue], script: list) -> None:  # type: ignore[type-arg]
    here, there = Clock(), Clock()
    assert played(LocalQueue(here), here, script) == played(make_redis(there), there, script)


@quick
@given(
    costs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=4, max_size=30),
    weights=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_the_bound_between_two_organisations(
    make_redis: Callable[[Clock], RedisQueue], costs: list[tuple[int, int]], weights: tuple[int, int]
) -> None:
    """While both stay ready, |W_a / w_a - W_b / w_b| <= c_a / w_a + c_b / w_b."""
    queue = make_redis(Clock())
    for number, pair in enumerate(costs):
        for org, cost, weight in zip("ab", pair, weights, strict=True):
            queue.push(Item(f"{org}{number}", ("m", org, "interactive", "l"), cost, weight=weight))
    largest = [max(c) for c in zip(*costs, strict=True)]
    bound = sum(c / w for c, w in zip(largest, weights, strict=True))
    served, left = Counter[str](), Counter(a=len(costs), b=len(costs))
    while left["a"] > 0 and left["b"] > 0:
        (lease,) = queue.lease("w", ["m"], 1, 60)
        org, number = lease.path[1], int(lease.id[1:])
        left[org] -= 1
        served[org] += costs[number]["ab".index(org)]
        if left["a"] > 0 and left["b"] > 0:
            assert abs(served["a"] / weights[0] - served["b"] / weights[1]) <= bound + 1e-9


@settings(quick, max_examples=examples(20))
@given(
    costs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=6, max_size=24),
    asks=st.lists(st.tuples(st.sampled_from("AB"), st.integers(1, 12)), min_size=4, max_size=40),
)
def test_the_bound_holds_for_what_is_served_or_left_to_who_holds_its_adapter(
    make_queue: Make, costs: list[tuple[int, int]], asks: list[tuple[str, int]]
) -> None:
    queue = make_queue(Clock())
    cost = {f"{org}{number}": c for number, pair in enumerate(costs) for org, c in zip("ab", pair, strict=True)}
    for name, tokens in cost.items():
        queue.push(Item(name, ("m", name[0], "interactive", "l"), tokens, adapter=name[0]))
    bound = sum(max(column) for column in zip(*costs, strict=True))
    for worker, slots in asks:
        queue.lease(worker, ["m"], slots, 60)
        waiting = {name for name in cost if queue.ahead(name) is not None}
        if {name[0] for name in waiting} < {"a", "b"}:
            break
        served = Counter[str]()
        for name in cost.keys() - waiting:
            served[name[0]] += cost[name]
        assert abs(served["a"] - served["b"]) <= bound


deaths = st.lists(
    st.tuples(st.sampled_from("ABC"), st.sampled_from(["work", "die", "late", "finish"])), min_size=15, max_size=60
)


@quick
@given(deaths=deaths, items=st.integers(1, 12))
def test_nothing_is_lost_or_doubled_when_workers_die_and_come_back(
    make_queue: Make, deaths: list[tuple[str, str]], items: int
) -> None:
    clock = Clock()
    queue = make_queue(clock)
    for number in range(items):
        queue.push(Item(f"i{number}", ("m", f"o{number % 3}", "interactive", "l"), 10))
    held: dict[str, list[tuple[str, int]]] = {worker: [] for worker in "ABC"}
    late: list[tuple[str, int]] = []
    finished, given_up = Counter[str](), list[str]()

    def note(expired: Expired) -> None:
        given_up.extend(expired.given_up)

    for worker, event in deaths:
        if event == "work":
            held[worker] += [(lease.id, lease.epoch) for lease in queue.lease(worker, ["m"], 2, 10)]
        elif event == "die":  # it was silent for long, but may still send answers to what it had
            late += held[worker]
            held[worker] = []
            for other in "ABC":
                queue.renew(other, 1 if other == worker else 100)
            clock.now_s += 20
            note(queue.expire())
        elif event == "late" and late:
            assert not queue.answer(*late.pop(0), b"late")
        elif event == "finish":
            for item_id, epoch in held[worker]:
                finished[item_id] += queue.answer(item_id, epoch, b"")
            held[worker] = []
    clock.now_s += 1000
    note(queue.expire())
    for life in itertools.count():
        leases = queue.lease(f"last{life}", ["m"], 100, 10)
        if not leases:
            break
        for lease in leases:
            finished[lease.id] += queue.answer(lease.id, lease.epoch, b"")
    assert all(count <= 1 for count in finished.values())
    ended = {item_id for item_id, count in finished.items() if count}
    assert ended | set(given_up) == {f"i{number}" for number in range(items)}
    assert not ended & set(given_up)
    assert len(deaths) >= LIVES or not given_up


def test_flows_that_come_and_go_leave_nothing_for_ever(make_redis: Callable[[Clock], RedisQueue]) -> None:
    """A flow's debt is kept for a while after its last item; in the end only the root's clock is left."""
    here, there = LocalQueue(Clock()), make_redis(Clock())
    for queue in (here, there):
        for number in range(300):
            queue.push(Item(f"i{number}", ("m", "o", "interactive", f"l{number}"), 10))
    orders = [[queue.lease("w", ["m"], 1, 60)[0].id for _ in range(300)] for queue in (here, there)]
    assert orders[0] == orders[1] == [f"i{number}" for number in range(300)]
    for name in there._redis.scan_iter(f"{there._prefix}[nc]:*", count=1000):
        root = name.endswith(b":")
        assert root or 0 < there._redis.ttl(name) <= 3600
