"""The one rule, whatever happens in whatever order: no token is trained that is older than max_lag."""

from __future__ import annotations

import json
from collections import deque

import pytest
from hypothesis import given, strategies as st
from weft.rl.schedule.concurrency import Concurrency
from weft.rl.schedule.pacer import Pacer
from weft.rl.schedule.schedules import Async, Partial, Schedule, Sync

PARTIAL = st.builds(
    Partial,
    tokens=st.integers(1, 60),
    in_flight=st.integers(1, 6),
    retention=st.integers(1, 3),
    budget=st.sampled_from(["completed", "generated"]),
)
SCHEDULES = st.one_of(
    st.builds(Sync, oversample=st.sampled_from([1.0, 1.5, 2.0])),
    st.builds(Async, max_lag=st.integers(1, 4)),
    PARTIAL,
)
#: What happens next: to which of the groups under way, and how.
EVENTS = st.lists(st.tuples(st.sampled_from(["finish", "progress", "drop", "step", "restart"]), st.integers(0, 99)))


class Loop:
    """A loop around the pacer with its own account: which version drew each token, and at which it was trained."""

    def __init__(self, schedule: Schedule, batch: int) -> None:
        self.schedule, self.pacer, self.version = schedule, Pacer(schedule, batch), 0
        self.born: dict[int, int] = {}
        self.flying: set[int] = set()
        self.trained: list[tuple[int, int]] = []
        self.training = False

    def settle(self) -> None:
        """Do all that the pacer asks for."""
        self.flying -= set(self.pacer.late())
        while self.pacer.room():
            number = self.pacer.start()
            self.born[number] = self.version
            self.flying.add(number)
        batch = self.pacer.take()
        if batch:
            assert not self.training
            self.training = True
            self.trained += [(self.born[number], self.version) for number in batch]
        assert self.flying or self.pacer.ready or self.training, "nothing is under way and nothing may start"

    def play(self, event: str, which: int) -> None:
        if event == "step" and self.training:
            self.pacer.stepped()
            self.version += 1
            self.training = False
        elif event == "restart":
            state = json.loads(json.dumps(self.pacer.state_dict()))
            self.pacer = Pacer(self.schedule, self.pacer.batch)
            self.pacer.load_state_dict(state)
            self.flying, self.training = set(), False
        elif event in ("finish", "drop", "progress") and self.flying:
            number = sorted(self.flying)[which % len(self.flying)]
            if event == "progress":
                self.pacer.progress(number, which)
                return
            self.flying.discard(number)
            if event == "drop":
                self.pacer.drop(number)
            else:
                self.pacer.finish(number, which, self.born[number])


@given(SCHEDULES, st.integers(1, 4), EVENTS)
def test_no_token_is_trained_that_is_older_than_max_lag(
    schedule: Schedule, batch: int, events: list[tuple[str, int]]
) -> None:
    loop = Loop(schedule, batch)
    loop.settle()
    for event, which in events:
        loop.play(event, which)
        loop.settle()
        assert loop.pacer.version == loop.version
        assert all(trained - born <= schedule.max_lag for born, trained in loop.trained)


@given(SCHEDULES, st.integers(1, 4), st.integers(1, 40))
def test_a_loop_that_goes_on_trains(schedule: Schedule, batch: int, rounds: int) -> None:
    """If groups end and steps are taken in turn, the loop advances: the pacer never waits for what will not come."""
    loop = Loop(schedule, batch)
    loop.settle()
    for _ in range(rounds):
        for _ in range(200):
            if loop.training:
                break
            loop.play("finish", 30)
            loop.settle()
        loop.play("step", 0)
        loop.settle()
    assert loop.version == rounds


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 30))
def test_groups_that_end_in_order_are_never_thrown_away(max_lag: int, batch: int, rounds: int) -> None:
    """Even when sampling is so fast that all capacity is in use: the batch in training counts."""
    pacer = Pacer(Async(max_lag), batch)
    under_way: deque[tuple[int, int]] = deque()
    for _ in range(rounds):
        for _ in range(pacer.room()):
            under_way.append((pacer.start(), pacer.version))
        while under_way:
            number, born = under_way.popleft()
            pacer.finish(number, 1, born)
        assert len(pacer.take()) == batch
        for _ in range(pacer.room()):
            under_way.append((pacer.start(), pacer.version))
        pacer.stepped()
        assert pacer.late() == []
    assert pacer.late_groups == 0


def test_sync_waits_for_the_step() -> None:
    pacer = Pacer(Sync(), 2)
    assert pacer.room() == 2
    first, second = pacer.start(), pacer.start()
    pacer.finish(first, 5)
    assert pacer.take() == []
    pacer.finish(second, 5)
    assert pacer.take() == [first, second]
    assert pacer.room() == 0
    pacer.stepped()
    assert pacer.room() == 2


def test_sync_cancels_what_it_asked_for_beyond_the_batch() -> None:
    pacer = Pacer(Sync(oversample=2.0), 2)
    numbers = [pacer.start() for _ in range(pacer.room())]
    assert len(numbers) == 4
    for number in numbers[:3]:
        pacer.finish(number, 1)
    assert pacer.take() == numbers[:2]
    assert sorted(pacer.late()) == numbers[2:]


def test_a_straggler_is_cancelled_once_it_cannot_be_trained_any_more() -> None:
    pacer = Pacer(Async(max_lag=1), 1)
    slow, quick = pacer.start(), pacer.start()
    pacer.finish(quick, 1)
    assert pacer.take() == [quick]
    assert pacer.late() == []  # it would be trained at version 1, one step after its start
    pacer.stepped()
    again = pacer.start()
    pacer.finish(again, 1)
    assert pacer.take() == [again]
    assert pacer.late() == [slow]


def test_what_the_server_reports_counts_more_than_when_it_was_asked() -> None:
    pacer = Pacer(Async(max_lag=1), 1)
    number = pacer.start()
    pacer.finish(number, 1, oldest=-1)
    assert pacer.late() == []
    pacer.finish(pacer.start(), 1, oldest=-2)
    assert pacer.late() == [2]


def test_a_batch_without_data_moves_no_version() -> None:
    pacer = Pacer(Sync(), 1)
    pacer.finish(pacer.start(), 1)
    pacer.take()
    pacer.stepped(moved=False)
    assert (pacer.version, pacer.room()) == (0, 1)


@given(PARTIAL, EVENTS)
def test_partial_rollouts_keep_their_pool_their_budget_and_their_retention(
    schedule: Partial, events: list[tuple[str, int]]
) -> None:
    """C3PO++: the pool is full whenever no batch is ready; a batch has as many tokens as the budget, and leaves no
    complete rollout behind; an incomplete one is carried over as often as it may; and each ends once."""
    pacer, born, drawn, complete = Pacer(schedule, 1), dict[int, int](), dict[int, int](), dict[int, int]()
    trained, purged, training = set[int](), set[int](), False

    def settle() -> None:
        nonlocal training
        for group in pacer.late():
            assert pacer.version + training - born[group] > schedule.retention
            purged.add(group)
            complete.pop(group, None)
            drawn.pop(group, None)
        while pacer.room():
            number = pacer.start()
            born[number], drawn[number] = pacer.version, 0
        batch = pacer.take()
        if batch:
            tokens = sum(complete[group] for group in batch)
            under_way = sum(drawn.values()) if schedule.budget == "generated" else 0
            assert tokens + under_way >= schedule.tokens
            assert set(batch) == complete.keys()
            assert all(pacer.version - born[group] <= schedule.retention for group in batch)
            assert not trained & set(batch)
            trained.update(batch)
            complete.clear()
            training = True
        assert len(drawn) == pacer.flying <= schedule.in_flight

    for event, which in events:
        settle()
        if event == "step" and training:
            pacer.stepped()
            training = False
        elif event in ("finish", "drop", "progress") and drawn:
            group = sorted(drawn)[which % len(drawn)]
            if event == "progress":
                drawn[group] = which
                pacer.progress(group, which)
            elif event == "drop":
                del drawn[group]
                pacer.drop(group)
            else:
                del drawn[group]
                complete[group] = which
                pacer.finish(group, which, born[group])
        if not pacer.full():
            settle()
            assert pacer.flying == schedule.in_flight or pacer.full()
    assert not trained & purged


@pytest.mark.parametrize(("budget", "full"), [("completed", False), ("generated", True)])
def test_the_token_budget(budget: str, full: bool) -> None:
    pacer = Pacer(Partial(tokens=100, in_flight=2, budget=budget), 1)
    done, going = pacer.start(), pacer.start()
    assert pacer.room() == 0
    pacer.progress(going, 70)
    assert not pacer.full()  # nothing is complete
    pacer.finish(done, 40)
    assert pacer.full() == full
    if not full:
        assert pacer.room() == 1
        more = pacer.start()
        pacer.finish(more, 60)
        assert pacer.room() == 0  # a batch is ready: nothing more until it is trained
        assert pacer.take() == [done, more]
    else:
        assert pacer.take() == [done]


def test_what_is_not_complete_is_carried_over_and_purged_after_its_retention() -> None:
    pacer = Pacer(Partial(tokens=1, in_flight=2, retention=2), 1)
    slow = pacer.start()
    for _ in range(2):
        pacer.finish(pacer.start(), 1)
        assert pacer.take()
        assert slow not in pacer.late()
        pacer.stepped()
    pacer.finish(pacer.start(), 1)
    assert pacer.take()
    assert pacer.late() == [slow]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sync(0.5),
        lambda: Async(0),
        lambda: Partial(0, 1),
        lambda: Pacer(Sync(), 0),
        lambda: Concurrency(start=0),
    ],
)
def test_refused_where_it_is_made(make) -> None:
    with pytest.raises(ValueError, match=r"at least 1|least <= start"):
        make()


def test_concurrency_grows_while_used_and_shrinks_when_a_queue_stays() -> None:
    limits = Concurrency(start=8)
    limits.observe(8, running=64, waiting=0)
    assert limits.limit == 10
    limits.observe(2, running=16, waiting=0)
    assert limits.limit == 10  # the limit is not used up
    for _ in range(3):
        limits.observe(10, running=64, waiting=40)
    assert limits.limit == 9
    for _ in range(3):
        limits.observe(10, running=64, waiting=40)
    assert limits.limit == 4  # it followed at once: half
    limits.refused()
    assert limits.limit == 2


def test_concurrency_settles_where_the_server_has_just_enough() -> None:
    """The server has places for 20 groups: further ones wait, which shows in the share of time spent waiting."""
    for start in (1, 200):
        limits, seen = Concurrency(start=start), []
        for _ in range(60):
            waiting = max(0, limits.limit - 20)
            share = waiting / limits.limit
            limits.observe(limits.limit, running=1 - share, waiting=share)
            seen.append(limits.limit)
        assert all(20 <= limit <= 31 for limit in seen[-20:]), seen


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))))
def test_concurrency_keeps_its_bounds(looks: list[tuple[int, int, int]]) -> None:
    limits = Concurrency(start=4, least=2, most=20)
    for look in looks:
        limits.observe(*look)
        assert 2 <= limits.limit <= 20


def test_what_is_too_old_is_not_taken_even_if_nobody_asked_what_is_late() -> None:
    pacer = Pacer(Async(max_lag=1), 1)
    numbers = [pacer.start() for _ in range(2)]
    for number, oldest in zip(numbers, (-2, 0), strict=True):
        pacer.finish(number, 1, oldest=oldest)
    assert pacer.take() == numbers[1:]
