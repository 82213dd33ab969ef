"""Usage: each operation once, at the prices of its admission, added up without a float."""

from __future__ import annotations

import tempfile
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import Session

from billing import usage
from billing.prices import KINDS, PriceList, amount_nusd, load_prices
from billing.usage import UsageRow
from store.db import Database
from store.tables import Organisation, UsageEvent

START = datetime(2026, 1, 1, tzinfo=UTC)
CHANGE = START + timedelta(days=10)
PRICES = load_prices(
    [
        {"version": "old", "effective_from": START, "models": {"*": dict.fromkeys(KINDS, 400_000)}},
        {"version": "new", "effective_from": CHANGE, "models": {"*": dict.fromkeys(KINDS, 999_999)}},
    ]
)


@pytest.fixture(autouse=True)
def organisations(database: Database) -> None:
    database.write_now(add_organisations)


def add_organisations(session: Session) -> None:
    session.add_all([Organisation(id=name, name=name, created_at=START) for name in ("a", "b")])


def record(
    session: Session,
    operation_id: str,
    tokens: dict[str, int],
    *,
    org_id: str = "a",
    run_id: str | None = "r",
    at: datetime = START,
    prices: PriceList = PRICES,
) -> list[UsageEvent]:
    return usage.record(
        session,
        org_id=org_id,
        session_id="s",
        run_id=run_id,
        operation_id=operation_id,
        base_model="m",
        tokens_by_kind=tokens,
        prices=prices,
        at=at,
    )


def test_an_operation_is_recorded_once(database: Database) -> None:
    first = database.write_now(lambda s: record(s, "op", {"prefill": 10, "cached_prefill": 0, "sample": 5}))
    again = database.write_now(lambda s: record(s, "op", {"prefill": 10, "sample": 5}))
    assert [(row.kind, row.quantity, row.amount_nusd) for row in first] == [("prefill", 10, 4000), ("sample", 5, 2000)]
    assert again == []
    with database.read() as session:
        assert usage.summary(session, "a") == [
            UsageRow("r", "prefill", "m", 10, 4000),
            UsageRow("r", "sample", "m", 5, 2000),
        ]


def test_the_price_is_that_of_the_admission(database: Database) -> None:
    [before] = database.write_now(lambda s: record(s, "op1", {"train": 7}, at=CHANGE - timedelta(microseconds=1)))
    [after] = database.write_now(lambda s: record(s, "op2", {"train": 7}, at=CHANGE))
    assert (before.price_version, before.rate_uusd, before.amount_nusd) == ("old", 400_000, 2800)
    assert (after.price_version, after.rate_uusd, after.amount_nusd) == ("new", 999_999, 7000)


def test_a_transaction_that_fails_meters_nothing(database: Database) -> None:
    def work(session: Session) -> None:
        record(session, "op", {"train": 1})
        raise KeyError("the result was not written")

    with pytest.raises(KeyError):
        database.write_now(work)
    with database.read() as session:
        assert usage.summary(session, "a") == []


@pytest.mark.parametrize("tokens", [{"train": -1}, {"storage": 1}])
def test_nonsense_is_refused(database: Database, tokens: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"cannot be negative|no price"):
        database.write_now(lambda s: record(s, "op", tokens))


def test_a_summary_is_of_one_organisation_and_what_was_asked(database: Database) -> None:
    database.write_now(lambda s: record(s, "op1", {"train": 1}))
    database.write_now(lambda s: record(s, "op2", {"train": 2}, run_id="q"))
    database.write_now(lambda s: record(s, "op3", {"sample": 4}, run_id=None))
    database.write_now(lambda s: record(s, "op4", {"train": 8}, org_id="b"))
    with database.read() as session:
        assert [(row.run_id, row.tokens) for row in usage.summary(session, "a")] == [(None, 4), ("q", 2), ("r", 1)]
        assert [row.tokens for row in usage.summary(session, "a", run_id="q")] == [2]
        assert [row.tokens for row in usage.summary(session, "b", since=START)] == [8]
        assert usage.summary(session, "b", since=datetime.now(UTC) + timedelta(minutes=1)) == []


def test_sums_beyond_64_bits(database: Database) -> None:
    dear = load_prices([{"version": "x", "effective_from": START, "models": {"*": dict.fromkeys(KINDS, 10**12)}}])
    for i in range(3):
        database.write_now(lambda s, i=i: record(s, f"op{i}", {"train": 9 * 10**9}, prices=dear))  # type: ignore[misc]
    with database.read() as session:
        assert [row.amount_nusd for row in usage.summary(session, "a")] == [27 * 10**18]


operations = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from(["r", "q", None]),
        st.integers(0, 15),  # operation: repeats happen
        st.dictionaries(st.sampled_from(KINDS), st.integers(0, 10**9), max_size=4),
        st.integers(0, 20),  # days after the start
    ),
    max_size=30,
)


@settings(max_examples=25, deadline=None)
@given(operations)
def test_a_summary_is_the_sum_of_first_records(calls: list[tuple[str, str | None, int, dict[str, int], int]]) -> None:
    expected: Counter[tuple[str, str | None, str]] = Counter()
    amounts: Counter[tuple[str, str | None, str]] = Counter()
    seen: set[tuple[int, str]] = set()
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{folder}/weft.db")
        database.migrate()
        database.write_now(add_organisations)

        def work(session: Session) -> None:
            for org_id, run_id, number, tokens_by_kind, day in calls:
                at = START + timedelta(days=day)
                record(session, f"op{number}", tokens_by_kind, org_id=org_id, run_id=run_id, at=at)
                for kind, tokens in tokens_by_kind.items():
                    if tokens and (number, kind) not in seen:
                        seen.add((number, kind))
                        expected[org_id, run_id, kind] += tokens
                        amounts[org_id, run_id, kind] += amount_nusd(tokens, 400_000 if day < 10 else 999_999)

        database.write_now(work)
        with database.read() as session:
            rows = {(org, row.run_id, row.kind): row for org in "ab" for row in usage.summary(session, org)}
        database.close()
    assert {key: row.tokens for key, row in rows.items()} == dict(expected)
    assert {key: row.amount_nusd for key, row in rows.items()} == dict(amounts)
    assert all(type(row.amount_nusd) is int for row in rows.values())
