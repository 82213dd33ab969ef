"""Limits on what each organisation may have queued: operations, and bytes of bodies."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from scheduler.journal.accepting.backlog import Backlog
from scheduler.journal.recovery import recover
from scheduler.order.operations import QueueFull
from tests.scheduler.journal.kit import Service, create, go, outcome, run_row, sample, train


def test_operations_are_limited_by_organisation() -> None:
    backlog = Backlog(2, 1000)
    for _ in range(2):
        backlog.take("a", 1)
    with pytest.raises(QueueFull, match="2 operations are queued; the limit is 2"):
        backlog.take("a", 1)
    backlog.take("b", 1)
    backlog.release("a", 1)
    backlog.take("a", 1)


def test_bytes_are_limited_but_one_body_is_always_let_in() -> None:
    backlog = Backlog(10, 100)
    backlog.take("a", 500)
    with pytest.raises(QueueFull, match="500 bytes are queued and this operation has 1; the limit is 100"):
        backlog.take("a", 1)
    backlog.release("a", 500)
    backlog.take("a", 60)
    with pytest.raises(QueueFull):
        backlog.take("a", 41)
    backlog.take("a", 40)
    assert backlog.of("a") == (2, 100)


def test_what_an_earlier_process_accepted_counts_and_is_never_refused() -> None:
    backlog = Backlog(1, 10)
    for _ in range(3):
        backlog.add("a", 9)
    assert backlog.of("a") == (3, 27)
    for _ in range(3):
        backlog.release("a", 9)
    assert backlog.of("a") == (0, 0)


@pytest.mark.parametrize(
    ("elsewhere", "size_bytes", "refused"),
    [
        ((2, 0), 1, None),
        ((3, 0), 1, "5 operations are queued; the limit is 5"),
        ((4, 0), 1, "6 operations are queued; the limit is 5"),
        ((0, 36), 4, None),
        ((0, 36), 5, "96 bytes are queued and this operation has 5; the limit is 100"),
    ],
)
def test_what_other_processes_have_queued_counts_too(
    elsewhere: tuple[int, int], size_bytes: int, refused: str | None
) -> None:
    backlog = Backlog(5, 100)
    for _ in range(2):
        backlog.take("a", 30)
    backlog.hear([{"a": elsewhere}])
    if refused is None:
        backlog.take("a", size_bytes)
        assert backlog.own() == {"a": (3, 60 + size_bytes)}, "what is elsewhere is counted there"
    else:
        with pytest.raises(QueueFull, match=refused):
            backlog.take("a", size_bytes)
        assert backlog.own() == {"a": (2, 60)}


def test_whoever_has_nothing_queued_is_forgotten() -> None:
    backlog = Backlog(5, 100)
    for org_id in "aab":
        backlog.take(org_id, 4)
    backlog.release("a", 4)
    assert backlog.own() == {"a": (1, 4), "b": (1, 4)}
    backlog.release("a", 4)
    assert backlog.own() == {"b": (1, 4)}
    backlog.release("a", 4)  # of one that was not counted: later ones are, all the same
    assert backlog.own() == {"b": (1, 4)}


def test_what_is_queued_counts_as_before_after_a_restart(folder: Path) -> None:
    """Also the bytes; a body that was completed has more than its client sent."""

    async def scenario() -> None:
        service = Service(folder)
        await service.journal.accept(create(), run_row())
        completed = replace(train(1), sent=b"as sent", body=b"as sent and completed")
        first = await service.journal.accept(completed)
        await service.journal.accept(sample(0))
        before = service.journal._admission._backlog.of("org")
        assert before == (3, len(b"as sent and completed") + len(b"{}"))
        restarted = Service(folder)
        recover(restarted.journal, restarted.database)
        assert restarted.journal._admission._backlog.of("org") == before
        again = replace(completed, body=b"whatever else it was completed with")
        assert await restarted.journal.accept(again) == first, "repeats are known by what was sent"
        training = restarted.journal.training
        training.close_for_good(training.runs["s:train:0"], "over", "user")
        await outcome(restarted, first)
        await restarted.journal.flush()
        assert restarted.journal._admission._backlog.of("org") == (1, len(b"{}"))

    go(scenario())
