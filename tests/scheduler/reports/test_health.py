"""The health of a run, from a history of rows that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy.orm import Session

from scheduler.order.plans import ForwardBackward, Sample
from scheduler.reports import health as report
from scheduler.reports.health import Health, Stall, health_of
from store import tables
from store.database.db import Database
from tests import rows

START = datetime(2026, 11, 1, tzinfo=UTC)
RUN = "s:train:0"


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def run_row(session: Session, org: str = "org", run: str = RUN) -> tables.Run:
    if session.get(tables.Organisation, org) is None:
        session.add(tables.Organisation(id=org, name=org, created_at=START))
        session.flush()
    session.add(rows.session_row(org, START, f"{org}-s"))
    session.flush()
    row = rows.run_row(org, START, run, f"{org}-s")
    session.add(row)
    session.flush()
    return row


def sampler(session: Session, name: str, made_s: float, kind: str = "snapshot") -> None:
    session.add(
        tables.Sampler(
            id=name, org_id="org", session_id="org-s", sampling_session_seq_id=0, base_model="m", adapter_ref="w",
            run_id=RUN, kind=kind, created_at=at(made_s),
        )
    )  # fmt: skip
    session.flush()


class Rows:
    """Writes operations; each is accepted, begins and ends at the given seconds (begins None: it waits)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seq = 0

    def add(
        self,
        lane: str,
        kind: str,
        accepted: float,
        begun: float | None = None,
        ended: float | None = None,
        n: int = 1,
        policy: Any = None,
        names: dict[str, int] | None = None,
        priority: str = "interactive",
    ) -> str:
        self._seq += 1
        name = f"{lane}-{kind}-{self._seq}"
        stretches: list[Any] = []
        if begun is not None and ended is not None:
            stretches = [[1, int((begun - accepted) * 1e6), int((ended - accepted) * 1e6), 1, 1, 1]]
        self._session.add(
            tables.Operation(
                id=name, org_id="org", session_id="s", lane=lane, seq=self._seq, kind=kind, base_model="m",
                state="done" if ended else "queued", tokens=1, body_ref="", body_sha256="",
                plan=msgspec.to_builtins(
                    Sample(n, 1, priority) if kind == "sample" else ForwardBackward((), names or {})
                ),
                accepted_at=at(accepted), finished_at=at(ended) if ended else None,
                timings={"stretches": stretches} if ended else None, policy=policy,
            )
        )  # fmt: skip
        return name


def health(database: Database, fill: Callable[[Session, Rows], Any], now_s: float, window_s: float = 3600) -> Health:
    def write(session: Session) -> None:
        run_row(session)
        fill(session, Rows(session))

    database.write_now(write)
    with database.read() as session:
        return health_of(session, session.get_one(tables.Run, RUN), at(now_s), timedelta(seconds=window_s))


def loop(session: Session, rows: Rows) -> None:
    """Two steps: sample for 60 s, train for 20 s; the second step's samples come from the first one's weights."""
    sampler(session, "first", 0)
    rows.add("first", "sample", 0, 10, 60, n=4, policy={"drawn": [{"0": 40}]})
    rows.add(RUN, "forward_backward", 60, 60, 79)
    rows.add(RUN, "optim_step", 60, 79, 80, policy={"version": 1})
    rows.add("first", "sample", 80, 80, 140, n=4, policy={"drawn": [{"0": 50}]})
    rows.add(RUN, "forward_backward", 140, 140, 159)
    rows.add(RUN, "optim_step", 140, 159, 160, policy={"version": 2})


def test_shares_of_a_plain_loop(database: Database) -> None:
    found = health(database, loop, 160)
    assert found.window_s == pytest.approx(160)
    assert found.trainer_wait == pytest.approx(1 - 40 / 160)
    assert found.sequences_in_flight == pytest.approx(4 * (50 + 60) / 160)
    assert (found.queue_p50_s, found.queue_p95_s) == pytest.approx((10, 19))
    assert found.sampling_wait == pytest.approx(10 / (60 + 60))


def test_the_wait_of_samples_is_that_of_the_urgent_ones(database: Database) -> None:
    def fill(session: Session, rows: Rows) -> None:
        sampler(session, "first", 0)
        rows.add("first", "sample", 0, 30, 40, n=3)
        rows.add("first", "sample", 0, 0, 10, n=1)
        rows.add("first", "sample", 0, 90, 91, n=8, priority="batch")
        rows.add("first", "sample", 0)

    assert health(database, fill, 100).sampling_wait == pytest.approx(90 / (3 * 40 + 10))


def test_the_wait_of_samples_is_not_known_before_one_has_ended(database: Database) -> None:
    def fill(session: Session, rows: Rows) -> None:
        sampler(session, "first", 0)
        rows.add("first", "sample", 0)

    assert health(database, fill, 100).sampling_wait is None


def test_staleness_counts_tokens_by_the_steps_between_drawing_and_training(database: Database) -> None:
    assert health(database, loop, 160).staleness == {0: 40, 1: 50}


def test_tokens_that_a_swap_made_fresher_count_as_they_were_drawn(database: Database) -> None:
    def fill(session: Session, rows: Rows) -> None:
        sampler(session, "follows", 0, "inflight")
        rows.add(RUN, "save_sampler", 0, 0, 1, policy={"version": 5})
        rows.add("follows", "sample", 10, 10, 20, policy={"drawn": [{"5": 30, "6": 8, "7": 2}]})
        for at in (11, 12):
            rows.add(RUN, "optim_step", at, at, at + 1, policy={"version": at - 5})
        rows.add("follows", "sample", 22, 22, 40, policy={"drawn": [{"7": 100}]})
        rows.add(RUN, "forward_backward", 30, 30, 31)
        rows.add(RUN, "optim_step", 30, 31, 32, policy={"version": 8})
        rows.add(RUN, "forward_backward", 41)

    assert health(database, fill, 42).staleness == {0: 2, 1: 108, 2: 30}


def test_named_sequences_say_what_was_trained_by_which_version_and_what_was_not(database: Database) -> None:
    """The first batch leaves one sequence out and keeps another for the second batch, which trains one again."""

    def fill(session: Session, rows: Rows) -> None:
        sampler(session, "follows", 0, "inflight")
        drawn = [{"0": 10}, {"0": 20}, {"0": 30}, {"0": 3, "1": 4}]
        one = rows.add("follows", "sample", 0, 0, 10, n=4, policy={"drawn": drawn})
        rows.add(RUN, "forward_backward", 20, 20, 21, names={f"{one}:0": 10, "another's:0": 5})
        rows.add(RUN, "optim_step", 20, 21, 22, policy={"version": 1})
        rows.add(RUN, "forward_backward", 30, 30, 31, names={f"{one}:0": 10, f"{one}:1": 20, f"{one}:3": 7})
        rows.add(RUN, "optim_step", 30, 31, 32, policy={"version": 2})
        rows.add("follows", "sample", 31, 31, 40, policy={"drawn": [{"2": 63}]})

    found = health(database, fill, 50)
    assert found.named
    assert found.staleness == {0: 10 + 4, 1: 10 + 20 + 3}
    assert found.acceptance == pytest.approx((10 + 20 + 7) / (67 + 63))
    assert found.untrained_tokens == 30


def test_the_latest_operations_count_where_all_name_more_sequences_than_are_read(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may name 4,096: for 20,000 operations that would be gigabytes."""
    monkeypatch.setattr(report, "MAX_NAMES", 12)
    monkeypatch.setattr(report, "AT_A_TIME", 2)

    def fill(_session: Session, rows: Rows) -> None:
        for number in range(8):
            begun = 10.0 * number
            names = {f"{number}:{place}": 1 for place in range(5)}
            rows.add(RUN, "forward_backward", begun, begun, begun + 10, names=names)

    found = health(database, fill, 80)
    assert found.named
    assert found.window_s == pytest.approx(40)  # of the last four, which name twenty


def test_training_is_by_the_version_that_its_place_in_the_run_gives_it(database: Database) -> None:
    """Also after a step that has not ended, and after a load, whatever was there before."""

    def fill(session: Session, rows: Rows) -> None:
        sampler(session, "first", 0)
        rows.add("first", "sample", 0, 0, 10, policy={"drawn": [{"3": 1}]})
        rows.add(RUN, "forward_backward", 20, 20, 21)
        rows.add(RUN, "load_state", 21, 21, 22, policy={"version": 3})
        rows.add("first", "sample", 22, 22, 24, policy={"drawn": [{"3": 10}]})
        rows.add(RUN, "forward_backward", 25, 25, 26)
        rows.add("first", "sample", 25, 25, 27, policy={"drawn": [{"3": 100}]})
        rows.add("first", "sample", 25, 25, 27)  # from before versions were kept
        rows.add(RUN, "optim_step", 28)
        rows.add(RUN, "forward_backward", 28)

    assert health(database, fill, 40).staleness == {0: 11, 1: 100}


def test_a_window_leaves_out_what_was_before(database: Database) -> None:
    found = health(database, loop, 160, window_s=30)
    assert found.window_s == pytest.approx(30)
    assert found.trainer_wait == pytest.approx(1 - 20 / 30)
    assert found.sequences_in_flight == pytest.approx(4 * 10 / 30)


def test_tokens_and_acceptance_are_those_that_were_metered(database: Database) -> None:
    def fill(session: Session, rows: Rows) -> None:
        sampler(session, "first", 0)
        rows.add("first", "sample", 0, 0, 100)
        for kind, quantity in (("sample", 1000), ("train", 400), ("prefill", 77)):
            session.add(
                tables.UsageEvent(
                    org_id="org", session_id="s", run_id=RUN, operation_id=kind, kind=kind, base_model="m",
                    quantity=quantity, price_version="v", rate_uusd=1, amount_nusd=1, recorded_at=at(50),
                )
            )  # fmt: skip

    found = health(database, fill, 100)
    assert (found.sampled_tokens, found.trained_tokens, found.acceptance) == (1000, 400, 0.4)
    assert (found.sampled_tokens_per_s, found.trained_tokens_per_s) == pytest.approx((10, 4))


def test_a_stall_names_what_is_waited_for(database: Database) -> None:
    oldest: list[str] = []

    def fill(session: Session, rows: Rows) -> None:
        loop(session, rows)
        for n in range(32):
            ended = 200 + n if n >= 3 else None
            name = rows.add("first", "sample", 160 + n, 170 + n if ended else None, ended, n=16)
            oldest.extend([name] if n == 0 else [])

    stall = health(database, fill, 572).stall
    assert stall == Stall("sampling", 3, 32, 0, oldest[0], 412.0)
    reason = "queued behind 5 pieces of work"
    assert stall.sentence(reason) == f"waiting for 3 of 32 groups; oldest sample 412 s, {reason}"


def test_training_that_waits_is_named_before_samples(database: Database) -> None:
    def fill(session: Session, rows: Rows) -> None:
        sampler(session, "first", 0)
        rows.add(RUN, "forward_backward", 50)
        rows.add("first", "sample", 10)

    stall = health(database, fill, 60).stall
    assert (stall.waiting_for, stall.open_training, stall.open_groups, stall.oldest_s) == ("training", 1, 1, 10)
    assert stall.sentence() == "waiting for 1 training operations; oldest operation 10 s"


def test_when_nothing_is_queued_it_is_the_client_that_is_waited_for(database: Database) -> None:
    stall = health(database, loop, 190).stall
    assert (stall.waiting_for, stall.oldest_request_id) == ("client", None)
    assert stall.sentence() == "nothing is queued; the client has sent nothing for 30 s"


def test_a_run_that_has_done_nothing_is_healthy_enough_to_ask(database: Database) -> None:
    found = health(database, lambda session, rows: None, 10)
    assert (found.trainer_wait, found.acceptance, found.staleness, found.stall.waiting_for) == (1.0, 0.0, {}, "client")
