"""The queue in Redis wakes one generator that can take what has come, and then another one if there is more."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from scheduler.links.contract import LEFT_S, Item
from scheduler.links.redis_clients import LONGEST_BLOCK_S
from scheduler.links.redis_queue import RedisQueue
from tests.scheduler.cluster.conftest import Clock

#: A bell that has rung is heard at once; one that has not been heard within this time counts as silent.
SILENT_S = 0.1


class Generator:
    def __init__(self, url: str, queue: str, name: str, clock: Clock) -> None:
        self.queue, self.name = RedisQueue(url, queue, clock), name

    def woken(self, *models: str) -> bool:
        return self.queue.wait(self.name, models or ["m"], SILENT_S)

    def lease(self, slots: int = 4) -> list[str]:
        return [lease.id for lease in self.queue.lease(self.name, ["m"], slots, 60)]

    @property
    def looks_again_s(self) -> float:
        return self.queue._longest_wait_s


Make = Callable[[str], Generator]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def generator(redis_url: str, clock: Clock) -> Iterator[Make]:
    queue, made = uuid.uuid4().hex, list[Generator]()

    def make(name: str) -> Generator:
        made.append(Generator(redis_url, queue, name, clock))
        return made[-1]

    yield make
    for one in made:
        one.queue.close()


def item(name: str, model: str = "m", adapter: str = "") -> Item:
    return Item(name, (model, "org", "interactive", "lane"), 10, adapter=adapter)


def test_a_generator_of_another_model_does_not_hear_it(generator: Make) -> None:
    one, other = generator("one"), generator("other")
    one.queue.push(item("a"))
    assert not other.woken("n")
    assert one.woken()


def test_many_items_wake_one_and_who_cannot_take_all_wakes_another(generator: Make) -> None:
    one, two, three = generator("one"), generator("two"), generator("three")
    one.queue.push_all([item("a"), item("b"), item("c")])
    assert one.woken()
    assert not two.woken()
    assert one.lease(slots=2) == ["a", "b"]
    assert two.woken()
    assert two.lease(slots=2) == ["c"]
    assert not three.woken()


def left_to_one_that_does_not_come(generator: Make) -> None:
    """Item "b" is left to "holder", until another generator comes for it."""
    holder = generator("holder")
    holder.queue.push(item("a", adapter="x"))
    assert holder.lease(slots=40) == ["a"]
    holder.queue.push(item("b", adapter="x"))
    assert holder.woken()  # for "a"


def test_one_looks_again_for_what_is_left_to_another(generator: Make, clock: Clock) -> None:
    left_to_one_that_does_not_come(generator)
    one, two = generator("one"), generator("two")
    assert one.lease() == two.lease() == []
    assert (one.looks_again_s, two.looks_again_s) == (LEFT_S, LONGEST_BLOCK_S)
    assert one.lease() == []
    assert one.looks_again_s == LEFT_S
    clock.now_s += LEFT_S + 0.001
    assert one.lease() == ["b"]


def test_when_it_has_got_work_another_one_looks(generator: Make) -> None:
    left_to_one_that_does_not_come(generator)
    one, two = generator("one"), generator("two")
    assert one.lease() == []
    one.queue.push(item("c"))
    assert one.woken()
    assert one.lease() == ["c"]
    assert two.woken()
    assert two.lease() == []
    assert two.looks_again_s == LEFT_S


def test_one_that_has_died_is_followed(generator: Make, clock: Clock) -> None:
    left_to_one_that_does_not_come(generator)
    assert generator("one").lease() == []
    clock.now_s += LEFT_S + 0.001
    two = generator("two")
    two.queue.push(item("c"))
    assert sorted(two.lease()) == ["b", "c"]
