"""Sequence numbers that are known to be new without asking the database."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sqlalchemy.orm import Session
from weft.wire.base import MAX_INT

from scheduler.journal.accepting import numbers as module
from scheduler.journal.accepting.numbers import Highest, highest, known
from scheduler.journal.ending.completions import CLIENT_STRIDE
from store import tables
from store.database.db import Database

NOW = datetime(2026, 11, 25, tzinfo=UTC)


def test_only_what_is_above_the_highest_of_its_client_is_new() -> None:
    numbers = Highest()
    assert not numbers.is_new("sampler", 7)  # nobody has looked
    numbers.found("sampler", 7, 6)
    assert numbers.is_new("sampler", 7)
    assert not numbers.is_new("sampler", 6)
    assert not numbers.is_new("other", 7)
    assert not numbers.is_new("sampler", 10**9 + 7)  # a client cloned from another


def test_what_is_used_is_new_no_more_and_what_was_passed_over_is_asked_for() -> None:
    numbers = Highest()
    numbers.used("sampler", 3)  # of which nothing is known: there may be higher ones
    assert not numbers.is_new("sampler", 4)
    numbers.found("sampler", 4, -1)
    numbers.used("sampler", 9)
    assert [numbers.is_new("sampler", seq) for seq in (5, 9, 10)] == [False, False, True]
    numbers.found("sampler", 5, 4)  # a look that began before: nothing goes back
    assert not numbers.is_new("sampler", 9)


def test_clients_are_told_apart_by_their_numbers() -> None:
    numbers, first = Highest(), 2 * CLIENT_STRIDE
    numbers.found("sampler", first + 4, first + 3)
    assert [numbers.is_new("sampler", first + seq) for seq in (3, 4)] == [False, True]
    numbers.used("sampler", first + 8)
    assert [numbers.is_new("sampler", first + seq) for seq in (8, 9)] == [False, True]
    assert not any(numbers.is_new("sampler", seq) for seq in (9, CLIENT_STRIDE + 9, first + CLIENT_STRIDE + 9))
    numbers.found("sampler", 0, -1)  # there is none
    assert numbers.is_new("sampler", 0)


def test_too_many_clients_are_forgotten_together_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    numbers = Highest()
    for lane in "ab":
        numbers.found(lane, 5, 4)
    assert [numbers.is_new(lane, 5) for lane in "ab"] == [True, True]
    numbers.found("c", 5, 4)
    assert [numbers.is_new(lane, 5) for lane in "abc"] == [False, False, True]


def test_numbers_are_known_by_lane_and_the_highest_of_each_client(database: Database) -> None:
    taken = [
        ("a", 3),
        ("a", CLIENT_STRIDE - 1),
        ("a", CLIENT_STRIDE),
        ("a", 2 * CLIENT_STRIDE - 1),
        ("a", 3 * CLIENT_STRIDE + 7),
        ("b", 0),
        ("c", 3 * CLIENT_STRIDE + 9),
        ("d", MAX_INT),
    ]

    def write(session: Session) -> None:
        session.add(tables.Organisation(id="o", name="o", created_at=NOW))
        session.flush()
        facts = {"org_id": "o", "session_id": "s", "kind": "sample", "base_model": "m", "state": "done", "tokens": 0}
        facts |= {"body_ref": "", "body_sha256": "", "plan": {}, "accepted_at": NOW}
        session.add_all([tables.Operation(id=f"{lane}{seq}", lane=lane, seq=seq, **facts) for lane, seq in taken])

    database.write_now(write)
    with database.read() as session:
        assert [highest(session, "a", client) for client in range(4)] == [
            *(CLIENT_STRIDE - 1, 2 * CLIENT_STRIDE - 1, -1, 3 * CLIENT_STRIDE + 7)
        ]
        assert [highest(session, lane, 0) for lane in "bc"] == [0, -1]
        assert [highest(session, lane, 3) for lane in "bc"] == [-1, 3 * CLIENT_STRIDE + 9]
        assert [highest(session, lane, MAX_INT // CLIENT_STRIDE) for lane in "ad"] == [-1, MAX_INT]
        assert all(known(session, lane, seq) for lane, seq in taken)
        assert not any(known(session, *other) for other in (("a", 0), ("a", 4), ("b", 3), ("c", 3)))
