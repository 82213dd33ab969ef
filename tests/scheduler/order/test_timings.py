from __future__ import annotations

from datetime import UTC, datetime, timedelta

from scheduler.order.timings import MAX_STRETCHES, Stretch, Timings

START = datetime(2026, 11, 21, tzinfo=UTC)


def at(us: int) -> datetime:
    return START + timedelta(microseconds=us)


def stretch(pass_id: int, us: int) -> Stretch:
    return Stretch(pass_id, runs=3, organisations=2, tokens=100, start=at(us))


def test_timings_of_two_passes() -> None:
    timings = Timings()
    for pass_id, begin, end in ((7, 10, 20), (9, 30, 40)):
        timings.begin(stretch(pass_id, begin))
        timings.begin(stretch(pass_id, begin + 1))  # a second slice in the same pass
        if pass_id == 7:
            timings.end(at(end))
    timings.done(at(38))
    timings.end(at(40))
    timings.done(at(50))
    assert timings.row(START, at(45)) == {
        "stretches": [[7, 10, 20, 3, 2, 100], [9, 30, 38, 3, 2, 100]],
        "computed": 38,
        "settled": 45,
    }


def test_timings_of_an_operation_that_no_worker_had() -> None:
    assert Timings().row(START, at(5)) == {"stretches": [], "computed": 5, "settled": 5}


def test_a_sample_that_was_started_twice() -> None:
    timings = Timings()
    timings.begin(stretch(0, 1))
    timings.end(at(2))
    timings.begin(stretch(0, 3))
    assert [row[1:3] for row in timings.row(START, at(4))["stretches"]] == [[1, 2], [3, 4]]


def test_the_row_is_bounded_and_a_clock_set_back_is_not_negative() -> None:
    timings = Timings()
    for pass_id in range(MAX_STRETCHES + 5):
        timings.begin(stretch(pass_id, -5))
        timings.end(at(-4))
    row = timings.row(START, at(1))
    assert (len(row["stretches"]), row["more"]) == (MAX_STRETCHES, 5)
    assert row["stretches"][0][1:3] == [0, 0]
