"""What every carrier of the fair queue promises, tested on both."""

from __future__ import annotations

import uuid
from contextlib import closing
from dataclasses import replace

import pytest

from scheduler.links.contract import LEFT_S, LIVES, MAX_ASIDE, Answered, FairQueue, Item
from scheduler.links.redis_queue import RedisQueue
from tests.scheduler.cluster.conftest import Clock, Make


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(make_queue: Make, clock: Clock) -> FairQueue:
    return make_queue(clock)


def item(name: str, org: str = "o", cost: int = 10, **more: int) -> Item:
    return Item(name, ("m", org, "interactive", "lane"), cost, name.encode() * 2, **more)


def taken(queue: FairQueue, worker: str, slots: int) -> list[str]:
    return [lease.id for lease in queue.lease(worker, ["m"], slots, 60)]


def drain(queue: FairQueue, worker: str = "w") -> list[str]:
    found = []
    while leases := queue.lease(worker, ["m"], 1, 60):
        found += [lease.id for lease in leases]
    return found


def answers(queue: FairQueue, consumer: str = "c") -> list[Answered]:
    """The queue's answer, asked for until it comes: a carrier's first call may only make ready."""
    return queue.answered(consumer, 0.01) or queue.answered(consumer, 0.5)


def test_one_lane_is_first_in_first_out_and_bodies_travel(queue: FairQueue) -> None:
    for name in "abc":
        assert queue.push(item(name))
    assert queue.peek() == queue.peek(("m",)) == "a"
    leases = queue.lease("w", ["m"], 2, 60)
    assert [(lease.id, lease.body, lease.path[0]) for lease in leases] == [("a", b"aa", "m"), ("b", b"bb", "m")]
    assert leases[0].epoch < leases[1].epoch
    assert queue.peek(("other",)) is None


def test_an_item_is_known_from_push_to_forget(queue: FairQueue) -> None:
    assert queue.push(item("a"))
    assert not queue.push(item("a"))
    (lease,) = queue.lease("w", ["m"], 5, 60)
    assert not queue.push(item("a"))
    assert queue.answer("a", lease.epoch, b"result")
    assert not queue.push(item("a"))
    assert queue.known(["a", "b"]) == {"a"}
    (answer,) = answers(queue)
    assert (answer.id, answer.result, answer.cost) == ("a", b"result", 10)
    queue.forget("a", answer.receipt)
    assert queue.known(["a"]) == set()
    assert queue.push(item("a"))
    assert drain(queue) == ["a"]


def test_shares_of_the_first_pops_follow_the_weights(queue: FairQueue) -> None:
    for i in range(9):
        queue.push(item(f"a{i}", "light"))
        queue.push(item(f"b{i}", "heavy", weight=2))
    first = drain(queue)[:9]
    assert sum(name.startswith("b") for name in first) == 6


def test_slots_are_filled_and_a_wide_item_is_never_stuck(queue: FairQueue) -> None:
    queue.push(item("wide", slots=8))
    queue.push(item("next"))
    assert [lease.id for lease in queue.lease("w", ["m"], 4, 60)] == ["wide"]
    assert queue.lease("w", ["m"], 0, 60) == []
    assert queue.lease("w", ["other"], 4, 60) == []
    assert [lease.id for lease in queue.lease("w", ["m"], 4, 60)] == ["next"]


def test_a_worker_may_ask_for_fewer_items_than_it_has_slots(queue: FairQueue) -> None:
    for name in "abc":
        queue.push(item(name))
    assert queue.lease("w", ["m"], 4, 60, most=0) == []
    assert [lease.id for lease in queue.lease("w", ["m"], 4, 60, most=2)] == ["a", "b"]
    assert [lease.id for lease in queue.lease("w", ["m"], 2, 60, most=2)] == ["c"]


def test_remove_takes_only_what_is_queued(queue: FairQueue) -> None:
    for name in "abc":
        queue.push(item(name))
    assert queue.remove("b")
    assert not queue.remove("b")
    assert drain(queue) == ["a", "c"]
    assert not queue.remove("a")
    queue.push(item("z", "other"))
    assert queue.remove("z")
    assert queue.peek() is None


def test_place_in_the_queue(queue: FairQueue) -> None:
    for i in range(4):
        queue.push(item(f"a{i}", "one"))
        queue.push(item(f"b{i}", "two"))
    assert queue.ahead("a0") == 0
    assert queue.ahead("b2") == 5
    assert queue.ahead("nothing") is None
    queue.lease("w", ["m"], 1, 60)
    assert queue.ahead("a0") is None


def test_a_silent_worker_loses_its_items_and_cannot_answer_when_it_comes_back(queue: FairQueue, clock: Clock) -> None:
    for name in "ab":
        queue.push(item(name))
    first = queue.lease("dead", ["m"], 2, 10)
    clock.now_s += 9
    assert queue.expire().back == []
    assert queue.renew("dead", 10)
    clock.now_s += 9
    assert queue.expire().back == []
    clock.now_s += 2
    assert queue.expire().back == ["a", "b"]
    assert not queue.renew("dead", 10)
    assert queue.holder("a") is None
    (again,) = queue.lease("alive", ["m"], 1, 10)
    assert again.id == "a"
    assert queue.holder("a") == "alive"
    assert not queue.answer("a", first[0].epoch, b"late")
    assert not queue.answer("b", first[1].epoch, b"late, and queued again")
    assert queue.answer("a", again.epoch, b"good")
    assert not queue.answer("a", again.epoch, b"twice")
    assert [answer.result for answer in answers(queue)] == [b"good"]


def test_an_item_that_kills_workers_is_given_up(queue: FairQueue, clock: Clock) -> None:
    queue.push(item("poison"))
    for life in range(1, LIVES + 1):
        assert len(queue.lease(f"w{life}", ["m"], 1, 10)) == 1
        clock.now_s += 11
        expired = queue.expire()
        assert (expired.given_up if life == LIVES else expired.back) == ["poison"]
    assert queue.lease("w", ["m"], 1, 10) == []
    assert queue.expire().given_up == ["poison"]  # until whoever settles it says that it has
    assert not queue.remove("poison")
    queue.forget("poison")
    assert queue.expire().given_up == []
    assert queue.known(["poison"]) == set()


def test_an_item_that_its_holder_lost_goes_on_elsewhere_and_is_given_up_at_last(queue: FairQueue) -> None:
    queue.push(item("poison"))
    for life in range(1, LIVES + 1):
        (lease,) = queue.lease(f"w{life}", ["m"], 1, 60)
        assert not queue.lose("poison", lease.epoch - 1)
        assert queue.lose("poison", lease.epoch)
        assert not queue.lose("poison", lease.epoch)
        assert not queue.answer("poison", lease.epoch, b"late")
        assert queue.expire().given_up == (["poison"] if life == LIVES else [])
    assert queue.lease("w", ["m"], 1, 60) == []


def test_what_one_worker_declines_another_gets_first(queue: FairQueue) -> None:
    for name in "abc":
        queue.push(item(name))
    queue.lease("other", ["m"], 0, 60)
    (lease,) = queue.lease("one", ["m"], 1, 60)
    assert queue.decline("a", lease.epoch - 1, "not its own") is None
    assert queue.decline("a", lease.epoch, "too hard") == []
    assert queue.decline("a", lease.epoch, "twice") is None
    assert not queue.answer("a", lease.epoch, b"late")
    assert queue.ahead("a") is None
    assert not queue.push(item("a"))
    assert [found.id for found in queue.lease("one", ["m"], 1, 60)] == ["b"]
    assert queue.expire().declined == []
    first, second = queue.lease("other", ["m"], 2, 60)
    assert (first.id, second.id) == ("a", "c")
    assert queue.answer("a", first.epoch, b"done")
    assert [answer.result for answer in answers(queue)] == [b"done"]


def test_what_all_decline_is_the_last_ones_to_answer_with_all_reasons(queue: FairQueue) -> None:
    queue.push(item("a"))
    queue.lease("elsewhere", ["other model"], 0, 60)
    queue.lease("two", ["m"], 0, 60)
    (lease,) = queue.lease("one", ["m"], 1, 60)
    assert queue.decline("a", lease.epoch, "too hard") == []
    (lease,) = queue.lease("two", ["m"], 1, 60)
    assert queue.decline("a", lease.epoch, "too long") == ["too hard", "too long"]
    assert queue.holder("a") == "two"
    assert queue.answer("a", lease.epoch, b"failed")


def test_what_waits_for_a_worker_that_leaves_is_told_as_declined_until_it_is_forgotten(
    queue: FairQueue, clock: Clock
) -> None:
    queue.push(item("a"))
    queue.lease("able", ["m"], 0, 10)
    (lease,) = queue.lease("one", ["m"], 1, 60)
    assert queue.decline("a", lease.epoch, "too hard") == []
    assert queue.expire().declined == []
    clock.now_s += 11
    assert queue.expire().declined == queue.expire().declined == [("a", ["too hard"])]
    clock.now_s += 60  # nobody is left: it waits for the next worker
    assert queue.expire().declined == []
    queue.lease("one again", ["m"], 0, 60)
    queue.forget("a")
    assert queue.known(["a"]) == set()
    assert queue.lease("new", ["m"], 1, 60) == []


def test_what_is_set_aside_can_be_removed_and_is_bounded(queue: FairQueue) -> None:
    queue.lease("able", ["m"], 0, 60)
    for number in range(MAX_ASIDE + 1):
        queue.push(item(f"i{number}"))
    for lease in queue.lease("one", ["m"], MAX_ASIDE, 60):
        assert queue.decline(lease.id, lease.epoch, "too hard") == []
    assert queue.lease("one", ["m"], 1, 60) == []  # what is still queued keeps its place
    assert queue.remove("i0")
    assert not queue.remove("i0")
    assert [lease.id for lease in queue.lease("one", ["m"], 1, 60)] == [f"i{MAX_ASIDE}"]
    assert [lease.id for lease in queue.lease("able", ["m"], 2, 60)] == ["i1", "i2"]


def test_an_answer_goes_to_one_consumer(queue: FairQueue) -> None:
    for name in "abcd":
        queue.push(item(name))
    for lease in queue.lease("w", ["m"], 4, 60):
        queue.answer(lease.id, lease.epoch, b"")
    queue.answered("one", 0.01)
    found = [answer.id for consumer in ("one", "two") for answer in queue.answered(consumer, 0.05)]
    assert len(found) == len(set(found))


def test_forgetting_a_queued_item_takes_it_out(queue: FairQueue) -> None:
    queue.push(item("a"))
    queue.push(item("b"))
    queue.forget("a")
    assert drain(queue) == ["b"]


def needing(adapter: str, *names: str) -> list[Item]:
    return [replace(item(name), adapter=adapter) for name in names]


@pytest.fixture
def warm(queue: FairQueue) -> FairQueue:
    """Worker "a" has served adapter x, "b" adapter y; both have 7 of 8 slots free."""
    for worker, adapter in [("a", "x"), ("b", "y")]:
        queue.push(*needing(adapter, f"first {adapter}"))
        assert len(queue.lease(worker, ["m"], 1, 60)) == 1
        assert queue.lease(worker, ["m"], 7, 60) == []
    return queue


def test_an_item_is_left_to_the_worker_that_holds_its_adapter(warm: FairQueue) -> None:
    for one in needing("y", "y1", "y2") + needing("x", "x1") + needing("z", "z1"):
        warm.push(one)
    assert taken(warm, "a", 7) == ["x1", "z1"]
    assert taken(warm, "a", 5) == []
    assert (warm.holder("y1"), warm.ahead("y1")) == (None, None)
    assert taken(warm, "b", 7) == ["y1", "y2"]


def test_nothing_is_left_to_a_worker_that_has_taken_its_offer_back(warm: FairQueue) -> None:
    warm.push(*needing("y", "y1"))
    warm.lease("b", ["m"], 0, 60)
    assert taken(warm, "a", 7) == ["y1"]
    warm.lease("b", ["m"], 7, 60, most=0)
    warm.push(*needing("x", "x1"))
    assert taken(warm, "b", 7) == []
    assert taken(warm, "a", 6) == ["x1"]


def test_what_was_left_and_not_fetched_is_anybodys_soon(warm: FairQueue, clock: Clock) -> None:
    warm.push(*needing("y", "y1"))
    assert taken(warm, "a", 7) == []
    clock.now_s += LEFT_S / 2
    assert taken(warm, "a", 7) == []
    clock.now_s += LEFT_S
    warm.push(*needing("y", "y2"))
    assert taken(warm, "a", 7) == ["y1", "y2"]  # which holds y now


def test_a_lone_worker_waits_for_nobody(queue: FairQueue, clock: Clock) -> None:
    for one in needing("x", "x1", "x2"):
        queue.push(one)
    assert taken(queue, "dead", 1) == ["x1"]
    queue.lease("dead", ["m"], 4, 60)  # has room, and took x2
    clock.now_s += 61
    assert queue.expire().back == ["x1", "x2"]
    assert taken(queue, "a", 4) == ["x1", "x2"]


def test_nothing_is_left_to_a_worker_that_is_much_fuller(warm: FairQueue) -> None:
    for number in range(8):
        warm.push(*needing("y", f"y{number}"))
    # Worker b has 1 of 8 slots busy, like a: y0 and y1 make it a quarter fuller.
    assert taken(warm, "a", 7) == [f"y{number}" for number in range(2, 8)]
    assert taken(warm, "b", 7) == ["y0", "y1"]


def test_nothing_is_left_to_a_worker_without_room(queue: FairQueue) -> None:
    for one in needing("x", *"12345"):
        queue.push(one)
    assert len(taken(queue, "a", 5)) == 5
    queue.push(*needing("y", "y1"))
    assert taken(queue, "b", 1) == ["y1"]
    queue.push(*needing("y", "y2"))
    assert taken(queue, "a", 1) == ["y2"]


def test_nothing_is_left_to_a_worker_that_has_declined_it(warm: FairQueue, clock: Clock) -> None:
    warm.push(*needing("y", "y1"))
    for worker in ("b", "dies"):
        (lease,) = warm.lease(worker, ["m"], 7, 60)
        if worker == "b":
            assert warm.decline("y1", lease.epoch, "too long") == []
    clock.now_s += 50
    assert [warm.lease(worker, ["m"], 7, 60) for worker in "ab"] == [[], []]
    clock.now_s += 11
    assert warm.expire().back == ["y1"]
    assert taken(warm, "a", 7) == ["y1"]


def test_what_is_left_to_a_worker_can_be_removed_and_forgotten(warm: FairQueue) -> None:
    for one in needing("y", "y1", "y2"):
        warm.push(one)
    assert taken(warm, "a", 7) == []
    assert not warm.push(*needing("y", "y1"))
    assert warm.remove("y1")
    warm.forget("y2")
    assert warm.known(["y1", "y2"]) == set()
    assert taken(warm, "b", 7) == []


def test_fair_order_is_the_same_whoever_holds_what(warm: FairQueue) -> None:
    """What is left to another worker counts as served, so other items of its flow wait for their turn."""
    for number in range(4):
        warm.push(replace(item(f"x{number}", "acme"), adapter="x"))
        warm.push(replace(item(f"y{number}", "other"), adapter="y"))
    assert taken(warm, "a", 2) == ["x0", "x1"]
    assert taken(warm, "b", 2) == ["y0", "y1"]
    assert taken(warm, "c", 8) == ["x2", "y2", "x3", "y3"]


def test_when_the_clock_of_redis_is_set_back_the_dead_keep_nothing_and_the_living_all(redis_url: str) -> None:
    """Neither what they hold nor what is left to them, until the clock is back where it was."""
    clock = Clock(100_000.0)
    with closing(RedisQueue(redis_url, uuid.uuid4().hex, clock)) as queue:
        for one in needing("x", "dead") + needing("y", "alive"):
            queue.push(one)
        for worker in ("a", "b"):
            assert len(queue.lease(worker, ["m"], 1, 6)) == 1
            queue.lease(worker, ["m"], 7, 6, most=0)
        queue.push(*needing("x", "left"))
        assert taken(queue, "b", 7) == []
        clock.now_s -= 3600
        assert taken(queue, "b", 7) == ["left"]
        assert queue.expire().back == []
        for _ in range(11):
            clock.now_s += 5.5
            assert queue.renew("b", 6)
        assert queue.expire().back == ["dead"]


def over(queue: FairQueue, worker: str, yields: int) -> list[str]:
    return [lease.id for lease in queue.lease(worker, ["m"], 0, 60, yields=yields)]


def test_a_full_worker_gets_the_next_of_a_flow_that_nobody_serves(queue: FairQueue) -> None:
    for name in ("a1", "a2", "a3"):
        queue.push(item(name, "flood", cost=1000))
    assert taken(queue, "w", 2) == ["a1", "a2"]
    assert over(queue, "w", 9) == []  # only the flood has something queued
    queue.push(item("b1", "chat"))
    queue.push(item("b2", "chat"))
    assert over(queue, "w", 0) == []
    assert over(queue, "w", 9) == ["b1"]
    assert over(queue, "w", 9) == []  # the chat is served
    (held,) = [lease for lease in queue.lease("v", ["m"], 1, 60, most=1)]
    assert held.id == "b2"  # a free slot still goes by the fair order alone


@pytest.mark.parametrize("way", ["answered", "forgotten", "lost", "declined", "died"])
def test_a_flow_is_new_again_when_nothing_of_it_is_in_hand(queue: FairQueue, clock: Clock, way: str) -> None:
    for name in ("b1", "b2"):
        queue.push(item(name, "chat"))
    (first,) = queue.lease("w", ["m"], 1, 5)
    assert over(queue, "v", 1) == []
    if way == "answered":
        assert queue.answer("b1", first.epoch, b"")
    elif way == "forgotten":
        queue.forget("b1")
    elif way == "lost":
        assert queue.lose("b1", first.epoch)
    elif way == "declined":
        assert queue.decline("b1", first.epoch, "no") == []
    else:
        clock.now_s += 6
        assert queue.expire().back == ["b1"]
    assert over(queue, "v", 1) == ["b2"]


def test_newcomers_wait_for_whoever_has_a_free_slot_and_take_no_more_than_their_turn(queue: FairQueue) -> None:
    for name in ("a1", "a2"):
        queue.push(item(name, "flood", cost=1000))
    assert taken(queue, "w", 1) == ["a1"]
    queue.lease("v", ["m"], 1, 60, most=0)
    queue.push(item("b", "chat"))
    assert over(queue, "w", 9) == []  # the other worker has a free slot
    assert taken(queue, "v", 1) == ["b"]
    queue.forget("b")
    queue.correct(("m", "chat", "interactive", "lane"), 5000)
    queue.push(item("b2", "chat"))
    queue.lease("v", ["m"], 0, 60, most=0)
    assert over(queue, "w", 9) == []  # the chat has used its share, so the flood is next
    assert queue.remove("a2")
    assert over(queue, "w", 9) == ["b2"]


def test_no_more_newcomers_than_a_worker_yields_slots(queue: FairQueue) -> None:
    queue.push(item("a", "flood", cost=1000))
    assert taken(queue, "w", 1) == ["a"]
    for name in "bcd":
        queue.push(item(name, name, slots=2))
    assert over(queue, "w", 3) == ["b", "c"]
    queue.push(Item("batch", ("m", "flood", "batch", "lane"), 10))
    queue.forget("a")
    assert over(queue, "w", 9) == ["d", "batch"]
