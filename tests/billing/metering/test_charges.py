"""The life of an operation's money: held when it is accepted, charged or given back when it ends, once."""

from __future__ import annotations

import tempfile
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from billing.metering import usage
from billing.metering.charges import Charge, settle
from billing.metering.usage import UsageRow
from billing.money import ledger
from billing.money.accounts import Payer
from billing.money.budgets import set_budget
from billing.money.grants import give
from billing.money.ledger import refund_operation
from billing.prices import KINDS, amount_nusd, load_prices, most_for_sample, most_for_tokens
from store import tables
from tests.billing.conftest import START, Till, add_organisations
from tests.migrated import database_in
from tests.search import examples

PAYER = Payer("a", "p", 7)
CHANGE = START + timedelta(days=10)
TWO_PRICES = load_prices(
    [
        {"version": "old", "effective_from": START, "models": {"*": dict.fromkeys(KINDS, 400_000)}},
        {"version": "new", "effective_from": CHANGE, "models": {"*": dict.fromkeys(KINDS, 999_999)}},
    ]
)


def pay(till: Till, amount_nusd: int, org_id: str = "a") -> None:
    till.database.write_now(
        lambda session: ledger.post(
            session, org_id=org_id, type="topup", amount_nusd=amount_nusd, ref_type="test", ref_id=str(amount_nusd)
        )
    )


class TestLife:
    def test_held_then_charged(self, till: Till) -> None:
        till.mode("prepaid")
        pay(till, 100)
        op = till.accept(60)
        assert (till.wallet().balance_nusd, till.wallet().held_nusd) == (100, 60)
        assert till.end(op, train=50) == 50
        assert (till.wallet().balance_nusd, till.wallet().held_nusd) == (50, 0)
        assert [(e.quantity, e.amount_nusd) for e in till.rows(tables.UsageEvent)] == [(50, 50)]
        assert [(e.type, e.amount_nusd) for e in till.rows(tables.LedgerEntry)] == [("topup", 100), ("usage", -50)]
        assert till.agrees()

    def test_a_failure_gives_all_back(self, till: Till) -> None:
        till.mode("prepaid")
        pay(till, 100)
        op = till.accept(100)
        assert till.refused(1).available_nusd == 0
        assert till.end(op) == 0
        assert (till.wallet().balance_nusd, till.wallet().held_nusd) == (100, 0)
        assert till.rows(tables.UsageEvent) == []
        assert till.agrees()

    def test_an_operation_ends_once(self, till: Till) -> None:
        op = till.accept(10)
        assert [till.end(op, train=7) for _ in range(3)] == [7, 0, 0]
        assert till.wallet().balance_nusd == -7
        assert till.agrees()

    def test_a_second_event_of_an_operation_is_refused_by_the_database(self, till: Till) -> None:
        till.end(till.accept(10, op_id="x"), train=7)
        again = Charge(Payer("a"), "s", "r", "x", "m", START, {"train": 7})
        with pytest.raises(Exception, match=r"UNIQUE|unique"):
            till.database.write_now(lambda session: settle(session, [again], till.prices, START))
        assert till.wallet().balance_nusd == -7
        assert till.agrees()

    def test_nonsense_is_refused_and_changes_nothing(self, till: Till) -> None:
        op = till.accept(10)
        with pytest.raises(ValueError, match="cannot be negative"):
            till.end(op, train=-1)
        assert till.operation(op).state == "queued"
        assert till.wallet().held_nusd == 10

    def test_what_costs_nothing_needs_money_that_is_not_spent(self, till: Till) -> None:
        till.mode("prepaid")
        for hold in (0, 1):
            assert (till.refused(hold).needed_nusd, till.refused(hold).available_nusd) == (hold, 0)
        pay(till, 5)
        last = till.accept(5)
        till.end(till.accept(0))  # a step behind the batch that takes the last of it
        till.end(last, train=5)
        assert "the balance is $0.000000000" in till.refused(0).figures
        assert till.agrees()

    def test_what_costs_nothing_stops_at_hard_budgets_and_credit_limits(self, till: Till) -> None:
        till.mode("postpaid", 5)
        till.end(till.accept(5), train=5)
        assert till.refused(0).limit == "the credit limit"
        till.mode("unlimited")
        till.accept(0)
        till.database.write_now(lambda session: set_budget(session, "a", "org", "a", "total", 7))
        till.accept(0)
        till.end(till.accept(2), train=2)
        assert "$0.000000007 of $0.000000007 are spent" in till.refused(0).figures
        till.database.write_now(lambda session: set_budget(session, "a", "org", "a", "total", 7, hard=False))
        till.accept(0)
        assert till.agrees()

    def test_the_organisations_are_apart(self, till: Till) -> None:
        till.mode("prepaid")
        till.mode("prepaid", org_id="b")
        pay(till, 5, "b")
        till.refused(1)
        till.accept(5, Payer("b"))
        assert till.wallet("b").held_nusd == 5
        assert till.wallet().held_nusd == 0


class TestSettling:
    def charge(self, hold_nusd: int | None, used: int, op_id: str = "x", payer: Payer = PAYER) -> Charge:
        return Charge(payer, "s", "r", op_id, "m", START, {"train": used} if used else {}, hold_nusd, "ann")

    @pytest.mark.parametrize(("hold", "cost", "said"), [(6, 7, True), (7, 7, False), (8, 7, False), (None, 7, False)])
    def test_what_costs_more_than_was_held_is_said(
        self, till: Till, caplog: pytest.LogCaptureFixture, hold: int | None, cost: int, said: bool
    ) -> None:
        till.accept(20)
        charge = self.charge(hold, cost)
        assert till.database.write_now(lambda session: settle(session, [charge], till.prices, START)) == cost
        assert [record.message for record in caplog.records] == ["operation x: held 6 nUSD, costs 7"] * said
        assert till.wallet().held_nusd == 20 - (hold or 0)

    def test_of_many_each_organisation_is_charged_its_own_at_once(self, till: Till) -> None:
        """Each gets one entry, which names the settlement of its events; free and failed operations leave none."""
        for org_id in ("a", "a", "b", "b"):
            till.accept(10, Payer(org_id))
        charges = [
            self.charge(10, 3, "one"),
            self.charge(10, 4, "two"),
            self.charge(10, 5, "three", Payer("b")),
            self.charge(10, 0, "four", Payer("b")),
            self.charge(0, 0, "five", Payer("b")),
        ]
        assert till.database.write_now(lambda session: settle(session, charges, till.prices, START)) == 12
        entries = till.rows(tables.LedgerEntry)
        assert {entry.org_id: entry.amount_nusd for entry in entries} == {"a": -7, "b": -5}
        assert {(e.type, e.ref_type, e.memo, e.at) for e in entries} == {("usage", "settlement", "", START)}
        events = till.rows(tables.UsageEvent)
        assert {(e.org_id, e.settlement) for e in events} == {(e.org_id, e.ref_id) for e in entries}
        assert sorted((e.operation_id, e.quantity) for e in events) == [("one", 3), ("three", 5), ("two", 4)]
        assert (till.wallet().held_nusd, till.wallet("b").held_nusd) == (0, 0)

    def test_what_is_free_has_events_and_no_entry(self, till: Till) -> None:
        till.prices = load_prices([{"version": "x", "effective_from": START, "models": {"*": dict.fromkeys(KINDS, 0)}}])
        till.end(till.accept(0), train=5)
        assert [event.amount_nusd for event in till.rows(tables.UsageEvent)] == [0]
        assert till.rows(tables.LedgerEntry) == []

    def test_hours_add_up_what_is_alike_and_keep_apart_what_is_not(self, till: Till) -> None:
        late = START + timedelta(minutes=59, seconds=59, microseconds=7)
        zone = timezone(timedelta(hours=5, minutes=30))
        for number, (at, payer) in enumerate(
            [
                (START, PAYER),
                (late.astimezone(zone), PAYER),
                (START + timedelta(hours=1), PAYER),
                (START, Payer("a", "q", 7)),
                (START, Payer("a", "p", 8)),
                (START, Payer("a")),
            ]
        ):
            charges = [self.charge(0, 2, f"{number}.{n}", payer) for n in range(2)]
            till.database.write_now(lambda session, at=at, charges=charges: settle(session, charges, till.prices, at))  # type: ignore[misc]
        hours = sorted(
            ((r.hour - START).total_seconds() / 3600, r.project_id, r.key_id, r.quantity, r.amount_nusd, r.events)
            for r in till.rows(tables.UsageHour)
        )
        assert hours == [
            (0, "", 0, 4, 4, 2),
            (0, "p", 7, 8, 8, 4),
            (0, "p", 8, 4, 4, 2),
            (0, "q", 7, 4, 4, 2),
            (1, "p", 7, 4, 4, 2),
        ]
        assert {(r.user_id, r.session_id, r.run_id, r.kind) for r in till.rows(tables.UsageHour)} == {
            ("ann", "s", "r", "train")
        }

    def test_what_belongs_to_no_run_or_user_has_an_hour_too(self, till: Till) -> None:
        charge = Charge(Payer("a"), "s", None, "x", "m", START, {"train": 3})
        till.database.write_now(lambda session: settle(session, [charge], till.prices, START))
        [row] = till.rows(tables.UsageHour)
        assert (row.run_id, row.user_id, row.project_id, row.key_id, row.quantity) == ("", "", "", 0, 3)
        assert till.wallet().held_nusd == 0

    def test_nothing_costs_nothing(self, till: Till) -> None:
        assert till.database.write_now(lambda session: settle(session, [], till.prices, START)) == 0
        assert till.rows(tables.LedgerEntry) == []

    def test_usage_is_never_negative(self, till: Till) -> None:
        with pytest.raises(ValueError, match="operation x reports -1 of train: usage cannot be negative"):
            till.database.write_now(lambda session: settle(session, [self.charge(5, -1)], till.prices, START))
        assert till.rows(tables.UsageEvent) == []


class TestModes:
    def test_unlimited_refuses_nothing_and_counts(self, till: Till) -> None:
        till.end(till.accept(10**15), train=10**15)
        assert till.wallet().balance_nusd == -(10**15)
        assert till.agrees()

    def test_an_overdraft_is_as_good_as_money_but_no_more(self, till: Till) -> None:
        till.mode("prepaid", 30)
        pay(till, 10)
        assert till.refused(41).available_nusd == 40
        till.end(till.accept(40), train=40)
        refusal = till.refused(1)
        assert (refusal.available_nusd, refusal.limit) == (0, "the prepaid balance")

    def test_postpaid_up_to_the_credit_limit(self, till: Till) -> None:
        till.mode("postpaid", 100)
        till.accept(60)
        refusal = till.refused(41)
        assert (refusal.limit, refusal.needed_nusd, refusal.available_nusd) == ("the credit limit", 41, 40)
        assert refusal.held_nusd == 60

    def test_a_new_wallet_is_as_the_settings_say(self, till: Till) -> None:
        from billing.money.wallets import set_default, wallet_of
        from store.settings import BillingSettings

        till.database.write_now(lambda s: set_default(s, BillingSettings(mode="prepaid", overdraft_usd=2)))
        wallet = till.database.write_now(lambda session: wallet_of(session, "b"))
        assert (wallet.mode, wallet.overdraft_nusd) == ("prepaid", 2 * 10**9)
        assert till.refused(2 * 10**9 + 1, Payer("b")).available_nusd == 2 * 10**9


class TestPrices:
    def test_the_price_is_that_of_the_acceptance(self, till: Till) -> None:
        till.prices = TWO_PRICES
        before = till.accept(2800, at=CHANGE - timedelta(microseconds=1))
        after = till.accept(7000, at=CHANGE)
        assert till.end(before, now=CHANGE + timedelta(days=1), train=7) == 2800
        assert till.end(after, train=7) == 7000
        events = till.rows(tables.UsageEvent)
        assert [(e.price_version, e.rate_uusd, e.amount_nusd) for e in events] == [
            ("old", 400_000, 2800),
            ("new", 999_999, 7000),
        ]
        assert till.agrees()

    @given(
        rates=st.tuples(*[st.integers(0, 3_000_000)] * 3),
        prompt=st.integers(1, 100_000),
        samples=st.integers(1, 64),
        new_tokens=st.integers(0, 10**6),
        data=st.data(),
    )
    def test_a_sample_never_costs_more_than_was_held(
        self, rates: tuple[int, int, int], prompt: int, samples: int, new_tokens: int, data: st.DataObject
    ) -> None:
        model = dict(zip(("prefill", "cached_prefill", "sample"), rates, strict=True)) | {"train": 0}
        prices = load_prices([{"version": "x", "effective_from": START, "models": {"*": model}}])
        cached = data.draw(st.integers(0, prompt))
        used = {
            "prefill": prompt - cached,
            "cached_prefill": cached + prompt * (samples - 1),
            "sample": data.draw(st.integers(0, new_tokens)),
        }
        cost = sum(amount_nusd(n, model[kind]) for kind, n in used.items())
        assert cost <= most_for_sample(prices, "m", prompt, samples, new_tokens, START)

    def test_training_costs_what_was_held(self) -> None:
        assert most_for_tokens(TWO_PRICES, "m", "train", 7, START) == 2800

    def test_a_free_sample_holds_nothing(self) -> None:
        free = load_prices([{"version": "x", "effective_from": START, "models": {"*": dict.fromkeys(KINDS, 0)}}])
        assert most_for_sample(free, "m", 10, 4, 100, START) == 0


class TestRefunds:
    def test_money_back_is_a_new_row_and_once(self, till: Till) -> None:
        op = till.accept(10)
        till.end(op, train=7)
        back = till.database.write_now(lambda session: refund_operation(session, "a", op, "our fault"))
        assert back is not None
        assert (back.amount_nusd, back.type) == (7, "refund")
        assert till.database.write_now(lambda session: refund_operation(session, "a", op)) is None
        assert till.database.write_now(lambda session: refund_operation(session, "b", op)) is None
        assert till.wallet().balance_nusd == 0
        assert len(till.rows(tables.UsageEvent)) == 1
        assert till.agrees()

    def test_an_entry_is_posted_once_and_never_of_nothing(self, till: Till) -> None:
        pay(till, 10)
        pay(till, 10)
        assert till.wallet().balance_nusd == 10
        with pytest.raises(ValueError, match="the amount is 0"):
            pay(till, 0)

    def test_the_ledger_is_append_only(self, till: Till) -> None:
        from sqlalchemy import text

        pay(till, 10)
        for change in ("UPDATE ledger_entries SET amount_nusd = 11", "DELETE FROM ledger_entries"):
            with pytest.raises(Exception, match="ledger_entries is append-only"):
                till.database.write_now(lambda session, change=change: session.execute(text(change)))  # type: ignore[misc]
        assert till.agrees()


class TestGrants:
    def give(self, till: Till, amount: int, kind: str = "promo", days: int | None = None) -> str:
        """Give a grant, later than those before it."""
        expires = START + timedelta(days=days) if days is not None else None
        now = START + timedelta(seconds=len(till.rows(tables.CreditGrant)))
        grant = till.database.write_now(
            lambda session: give(session, "a", amount, kind=kind, expires_at=expires, now=now)  # type: ignore[arg-type]
        )
        return grant.id

    def remaining(self, till: Till) -> dict[str, int]:
        return {grant.id: grant.remaining_nusd for grant in till.rows(tables.CreditGrant)}

    def test_promotions_and_what_expires_soonest_are_used_first(self, till: Till) -> None:
        far = datetime.now(UTC) + timedelta(days=400) - START
        paid = self.give(till, 10, "paid", far.days)
        forever = self.give(till, 10)
        late, soon = self.give(till, 10, days=far.days + 2), self.give(till, 10, days=far.days + 1)
        till.mode("prepaid")
        till.end(till.accept(15), train=15)
        assert self.remaining(till) == {paid: 10, forever: 10, late: 5, soon: 0}
        till.end(till.accept(10), train=10)
        assert self.remaining(till) == {paid: 10, forever: 5, late: 0, soon: 0}
        till.end(till.accept(15), train=15)
        assert set(self.remaining(till).values()) == {0}
        till.refused(1)
        assert till.agrees()

    def test_what_has_expired_cannot_be_spent(self, till: Till) -> None:
        self.give(till, 10, days=1)
        pay(till, 5)
        till.mode("prepaid")
        assert till.refused(6).available_nusd == 5
        till.accept(5)
        assert till.wallet().held_nusd == 5

    def test_expiry_spares_what_is_held(self, till: Till) -> None:
        from billing.money.grants import expire

        grant = self.give(till, 10, days=1)
        till.mode("prepaid")
        with till.database.read() as session:
            assert session.get_one(tables.CreditGrant, grant).remaining_nusd == 10
        # As if accepted before the grant expired: `hold` looks at the clock, so the wallet is unlimited for a moment.
        till.mode("unlimited")
        op = till.accept(6)
        till.mode("prepaid")
        assert expire(till.database) == {"expired": 1}
        assert (till.wallet().balance_nusd, till.wallet().held_nusd) == (6, 6)
        till.end(op, train=4)
        assert expire(till.database) == {"expired": 1}
        assert till.wallet().balance_nusd == 0
        assert expire(till.database) == {"expired": 0}
        assert self.remaining(till) == {grant: 0}
        assert [e.amount_nusd for e in till.rows(tables.LedgerEntry) if e.type == "expiry"] == [-4, -2]
        assert till.agrees()


class TestSummary:
    def test_of_one_organisation_and_what_was_asked(self, till: Till) -> None:
        for used, org, run in (({"train": 1}, "a", "r"), ({"train": 2}, "a", "q"), ({"sample": 4}, "b", "r")):
            till.end(till.accept(9, Payer(org), run_id=run), **used)
        with till.database.read() as session:
            assert usage.summary(session, "a") == [UsageRow("q", "train", "m", 2, 2), UsageRow("r", "train", "m", 1, 1)]
            assert [row.quantity for row in usage.summary(session, "a", run_id="q")] == [2]
            assert usage.summary(session, "b", since=datetime.now(UTC) + timedelta(hours=2)) == []

    def test_sums_beyond_64_bits(self, till: Till) -> None:
        dear = [{"version": "x", "effective_from": START, "models": {"*": dict.fromkeys(KINDS, 10**12)}}]
        till.prices = load_prices(dear)  # type: ignore[arg-type]
        for run in ("p", "q", "r"):
            till.end(till.accept(4 * 10**18, run_id=run), train=4 * 10**9)
            pay(till, 4 * 10**18 + ord(run))
        with till.database.read() as session:
            assert sum(row.amount_nusd for row in usage.summary(session, "a")) == 12 * 10**18
        assert till.agrees()


operations = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from(["r", "q"]),
        st.integers(0, 15),  # operation: repeats happen
        st.dictionaries(st.sampled_from(KINDS), st.integers(0, 10**9), max_size=4),
        st.integers(0, 20),  # days after the start
    ),
    max_size=20,
)


@settings(max_examples=examples(15), deadline=None)
@given(operations)
def test_a_summary_is_the_sum_of_first_endings(calls: list[tuple[str, str, int, dict[str, int], int]]) -> None:
    expected: Counter[tuple[str, str, str]] = Counter()
    amounts: Counter[tuple[str, str, str]] = Counter()
    seen: set[int] = set()
    with tempfile.TemporaryDirectory() as folder:
        database = database_in(Path(folder))
        database.write_now(add_organisations)
        till = Till(database, TWO_PRICES)
        for org_id, run_id, number, used, day in calls:
            if number not in seen:
                till.accept(4 * 10**15, Payer(org_id), START + timedelta(days=day), f"op{number}", run_id)
                seen.add(number)
                for kind, tokens in used.items():
                    if tokens:
                        expected[org_id, run_id, kind] += tokens
                        amounts[org_id, run_id, kind] += amount_nusd(tokens, 400_000 if day < 10 else 999_999)
            till.end(f"op{number}", **used)
        with database.read() as session:
            rows = {(org, row.run_id, row.kind): row for org in "ab" for row in usage.summary(session, org)}
        assert till.agrees()
        database.close()
    assert {key: row.quantity for key, row in rows.items()} == dict(expected)
    assert {key: row.amount_nusd for key, row in rows.items()} == dict(amounts)
