"""The wallets and budgets that a batch of operations moves: read once, checked and moved in memory, written once.

The caller has the lock of every organisation in the batch (`store.database.bulk.take_locks`) until the commit, so
values read here stay true, whatever other processes do; that makes limits hard. `hold` is called when operations are
accepted, `settle` when they have ended, and `store` at the end of the batch. Nothing else writes wallets' holds,
budgets' counts or the remains of grants.

Every operation passes here, possibly in a batch of one: hence plain rows and not mapped objects, for speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from sqlalchemy import Select, and_, exists, insert, select
from sqlalchemy.orm import Session
from weft.money import dollars

from billing.money.wallets import available_nusd, make_wallets
from store.database import leaps
from store.database.bulk import Question, among, ask, insert_into, insert_rows, update_rows
from store.tables import Alert, Budget, BudgetAlert, BudgetPeriod, CreditGrant, LedgerEntry, Wallet

_W, _G, _B, _P = (table.__table__.c for table in (Wallet, CreditGrant, Budget, BudgetPeriod))
_HAS_GRANTS = exists().where(_G.org_id == _W.org_id, _G.remaining_nusd > 0)


def _read(dialect: str) -> Select[Any]:
    """Each wallet with each of its budgets and each period of those; None in place of budgets or periods that do not
    exist."""
    of_payer = and_(_B.org_id == _W.org_id, among(_B.org_id, "orgs")[dialect], among(_B.scope_id, "scopes")[dialect])
    of_time = and_(_P.budget_id == _B.id, among(_P.start, "starts")[dialect])
    return (
        select(
            *(_W.org_id, _W.mode, _W.balance_nusd, _W.held_nusd, _W.overdraft_nusd, _HAS_GRANTS),
            *(_B.id, _B.org_id, _B.scope, _B.scope_id, _B.period, _B.limit_nusd, _B.hard, _B.alert_pcts),
            *(_P.start, _P.spent_nusd, _P.held_nusd),
        )
        .select_from(Wallet.__table__.outerjoin(Budget.__table__, of_payer).outerjoin(BudgetPeriod.__table__, of_time))
        .where(among(_W.org_id, "orgs")[dialect])
    )


READ: Question = {dialect: _read(dialect) for dialect in ("postgresql", "sqlite")}
_DISPUTES = select(Alert.message).where(Alert.kind == "dispute", Alert.resolved_at.is_(None)).order_by(Alert.id)
_GRANTS = select(_G.id, _G.org_id, _G.kind, _G.remaining_nusd, _G.created_at, _G.expires_at)
#: The start of the single period of a total budget.
EVER = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Payer:
    """The organisation, project and key that an operation is charged to."""

    org_id: str
    project_id: str | None = None
    key_id: int | None = None

    def scope_ids(self) -> dict[str, str]:
        ids = {"org": self.org_id}
        if self.project_id is not None:
            ids["project"] = self.project_id
        if self.key_id is not None:
            ids["key"] = str(self.key_id)
        return ids


@dataclass
class WalletRow:
    org_id: str
    mode: str
    balance_nusd: int
    held_nusd: int
    overdraft_nusd: int
    changed: bool = False


@dataclass
class GrantRow:
    id: str
    org_id: str
    kind: str
    remaining_nusd: int
    created_at: datetime
    expires_at: datetime | None
    changed: bool = False


@dataclass(frozen=True)
class BudgetLimit:
    id: str
    org_id: str
    scope: str
    scope_id: str
    period: str
    limit_nusd: int
    hard: bool
    alert_pcts: list[int]


@dataclass
class PeriodRow:
    budget_id: str
    start: datetime
    spent_nusd: int = 0
    held_nusd: int = 0
    new: bool = False
    changed: bool = False


class OutOfMoney(Exception):
    """An operation could cost more than a limit allows; or it costs nothing (`needed_nusd` is 0), but the limit is used
    up. Amounts are in nano-USD; `limit` names the limit, `figures` says how much it is and what was spent of it,
    `remedy` what helps; `scope` is "wallet", or the budget's."""

    def __init__(
        self, scope: str, limit: str, figures: str, remedy: str, needed_nusd: int, available_nusd: int, held_nusd: int
    ) -> None:
        super().__init__(limit)
        self.scope = scope
        self.limit = limit
        self.figures = figures
        self.remedy = remedy
        self.needed_nusd = needed_nusd
        self.available_nusd = available_nusd
        self.held_nusd = held_nusd


def period_start(period: str, at: datetime) -> datetime:
    """The start of the period that contains `at`: its month in UTC, or EVER."""
    if period == "total":
        return EVER
    at = at.astimezone(UTC)
    return datetime(at.year, at.month, 1, tzinfo=UTC)


def wanted(payers: Collection[Payer], at: Collection[datetime]) -> dict[str, Any]:
    """The parameters of READ for these payers and times."""
    scope_ids = {scope_id for payer in payers for scope_id in payer.scope_ids().values()}
    months = {period_start("month", when) for when in at}
    orgs = sorted({payer.org_id for payer in payers})
    return {"orgs": orgs, "scopes": sorted(scope_ids), "starts": [EVER, *sorted(months)]}


@dataclass(frozen=True)
class Found:
    """The rows that READ found, and the parameters it was run with."""

    wanted: dict[str, Any]
    rows: list[Any]


class Accounts:
    """The accounts of some payers. `at` are the times at which their operations were accepted; `found` is what this
    transaction has read of them already."""

    def __init__(
        self,
        session: Session,
        payers: Collection[Payer],
        at: Collection[datetime],
        now: datetime,
        found: Found | None = None,
    ) -> None:
        self._session, self._connection = session, session.connection()
        self._now = now
        self._wallets: dict[str, WalletRow] = {}
        self._grants: defaultdict[str, list[GrantRow]] = defaultdict(list)
        self._budgets: defaultdict[tuple[str, str, str], list[BudgetLimit]] = defaultdict(list)
        self._periods: dict[tuple[str, datetime], PeriodRow] = {}
        self._limits_of: dict[tuple[Payer, datetime], list[tuple[BudgetLimit, PeriodRow]]] = {}
        granted = self._read(wanted(payers, at), found)
        if granted:
            self._read_grants(granted)

    def hold(self, payer: Payer, amount_nusd: int, at: datetime) -> None:
        """Hold an amount for an operation accepted at `at`. An operation that costs nothing still needs some money that
        is not spent; that may be held, since its owner has then paid for the work that it belongs to. Raises
        OutOfMoney, with nothing held."""
        wallet = self._wallets[payer.org_id]
        limits = self._limits(payer, at)
        self._check_wallet(wallet, amount_nusd)
        for budget, period in limits:
            _check_budget(budget, period, amount_nusd)
        wallet.held_nusd += amount_nusd
        wallet.changed = wallet.changed or amount_nusd != 0
        for _, period in limits:
            period.held_nusd += amount_nusd
            period.changed = True

    def settle(self, payer: Payer, held_nusd: int, amount_nusd: int, at: datetime) -> None:
        """Release the hold of an operation accepted at `at`, and charge what it costs."""
        wallet = self._wallets[payer.org_id]
        wallet.held_nusd -= held_nusd
        wallet.balance_nusd -= amount_nusd
        wallet.changed = wallet.changed or held_nusd != 0 or amount_nusd != 0
        self._burn(payer.org_id, amount_nusd)
        for budget, period in self._limits(payer, at):
            before = period.spent_nusd
            period.held_nusd -= held_nusd
            period.spent_nusd += amount_nusd
            period.changed = True
            self._alert(budget, period, before)

    def expire_grants(self) -> int:
        """Take back expired grants of these organisations, except for held amounts, which were promised to running
        work; and not while the time is not believed. Returns how many grants had something to take back."""
        expired = 0
        for org_id, grants in self._grants.items():
            wallet = self._wallets[org_id]
            for grant in grants:
                over = grant.expires_at is not None and grant.expires_at <= self._now
                amount = min(grant.remaining_nusd, max(0, wallet.balance_nusd - wallet.held_nusd)) if over else 0
                if amount and self._believes_the_time:
                    expired += 1
                    grant.remaining_nusd -= amount
                    grant.changed = True
                    wallet.balance_nusd -= amount
                    wallet.changed = True
                    self._post_expiry(grant, amount)
        return expired

    @cached_property
    def _believes_the_time(self) -> bool:
        return leaps.settles_at(self._session, self._now) is None

    def store(self) -> None:
        """Write all changes."""
        connection = self._connection
        if wallets := [_of_wallet(wallet) for wallet in self._wallets.values() if wallet.changed]:
            update_rows(connection, Wallet, wallets, key=("org_id",))
        grants = [grant for group in self._grants.values() for grant in group if grant.changed]
        if grants:
            update_rows(connection, CreditGrant, [{"id": g.id, "remaining_nusd": g.remaining_nusd} for g in grants])
        moved = [period for period in self._periods.values() if period.changed]
        if made := [_of_period(period) for period in moved if period.new]:
            insert_rows(connection, BudgetPeriod, made)
        if kept := [_of_period(period) for period in moved if not period.new]:
            update_rows(connection, BudgetPeriod, kept, key=("budget_id", "start"))

    # ---- reading

    def _read(self, wanted: dict[str, Any], found: Found | None) -> list[str]:
        """Read wallets and budgets. Returns the organisations that have unused grants; most have none."""
        connection, org_ids = self._connection, wanted["orgs"]
        rows = found.rows if found is not None and found.wanted == wanted else ask(connection, (READ, wanted))[0]
        if len({row[0] for row in rows}) < len(org_ids):
            make_wallets(self._session, org_ids)
            (rows,) = ask(connection, (READ, wanted))
        self._wallets = {row[0]: WalletRow(*row[:5]) for row in rows}
        budgets = {row[6]: BudgetLimit(*row[6:14]) for row in rows if row[6] is not None}
        for limit in budgets.values():
            self._budgets[limit.org_id, limit.scope, limit.scope_id].append(limit)
        for budget_id, start, spent, held in ((row[6], *row[14:]) for row in rows if row[14] is not None):
            # PostgreSQL returns it in its own time zone, where it may be in another month.
            self._periods[budget_id, start] = PeriodRow(budget_id, start.astimezone(UTC), spent, held)
        return sorted({row[0] for row in rows if row[5]})

    def _read_grants(self, org_ids: list[str]) -> None:
        query = _GRANTS.where(_G.org_id.in_(org_ids), _G.remaining_nusd > 0)
        grants = [GrantRow(*row) for row in self._connection.execute(query)]
        for grant in sorted(grants, key=burning_order):
            self._grants[grant.org_id].append(grant)

    def _limits(self, payer: Payer, at: datetime) -> list[tuple[BudgetLimit, PeriodRow]]:
        """The budgets, in their periods, that count an operation accepted at `at`."""
        if not self._budgets:
            return []
        month = period_start("month", at)
        found = self._limits_of.get((payer, month))
        if found is None:
            budgets = [b for scope, ref in payer.scope_ids().items() for b in self._budgets[payer.org_id, scope, ref]]
            found = self._limits_of[payer, month] = [(budget, self._period(budget, month)) for budget in budgets]
        return found

    def _period(self, budget: BudgetLimit, month: datetime) -> PeriodRow:
        start = period_start(budget.period, month)
        return self._periods.setdefault((budget.id, start), PeriodRow(budget.id, start, new=True))

    # ---- checking and moving

    def _check_wallet(self, wallet: WalletRow, amount_nusd: int) -> None:
        left = _left(wallet, amount_nusd)
        if left is None or (amount_nusd <= left and left > 0 and wallet.org_id not in self._grants):
            return
        self.expire_grants()
        left = _left(wallet, amount_nusd)
        assert left is not None
        if amount_nusd > left or left <= 0:
            limit = "the prepaid balance" if wallet.mode == "prepaid" else "the credit limit"
            figures = f"the balance is {dollars(wallet.balance_nusd)}, {dollars(wallet.overdraft_nusd)} may be owed"
            figures = "; ".join([figures, *self._session.scalars(_DISPUTES.where(Alert.org_id == wallet.org_id))])
            helps = 0 < amount_nusd <= left + wallet.held_nusd
            remedy = "top up" + (
                ", or wait until running operations have released what they do not need" if helps else ""
            )
            raise OutOfMoney("wallet", limit, figures, remedy, amount_nusd, left, wallet.held_nusd)

    def _burn(self, org_id: str, amount_nusd: int) -> None:
        for grant in self._grants.get(org_id, ()):
            part = min(amount_nusd, grant.remaining_nusd)
            grant.changed = grant.changed or part > 0
            grant.remaining_nusd -= part
            amount_nusd -= part

    def _post_expiry(self, grant: GrantRow, amount_nusd: int) -> None:
        values = {
            "org_id": grant.org_id,
            "type": "expiry",
            "amount_nusd": -amount_nusd,
            "ref_type": "grant",
            "ref_id": f"{grant.id}:{grant.remaining_nusd}",  # taken back in parts, if some of it was held
            "memo": f"credit of {grant.created_at:%Y-%m-%d}",
            "at": self._now,
        }
        self._connection.execute(insert(LedgerEntry), [values])

    def _alert(self, budget: BudgetLimit, period: PeriodRow, before_nusd: int) -> None:
        reached = [
            pct for pct in budget.alert_pcts if before_nusd * 100 < budget.limit_nusd * pct <= period.spent_nusd * 100
        ]
        if reached:
            record_alerts(self._session, budget, period.start, period.spent_nusd, reached, self._now)


def record_alerts(
    session: Session, budget: Budget | BudgetLimit, start: datetime, spent_nusd: int, pcts: list[int], now: datetime
) -> None:
    """Record that spending has reached these percentages of a budget; each is recorded once in a period."""
    facts = {"budget_id": budget.id, "start": start, "org_id": budget.org_id, "limit_nusd": budget.limit_nusd}
    rows = [facts | {"pct": pct, "spent_nusd": spent_nusd, "at": now} for pct in pcts]
    session.execute(insert_into(session, BudgetAlert).on_conflict_do_nothing(), rows)


def check_left(session: Session, payer: Payer, now: datetime) -> None:
    """Raise OutOfMoney unless an operation that costs nothing would be accepted now. Actions that are no operations and
    cost nothing by themselves call this, in a write that has the organisation's lock."""
    accounts = Accounts(session, {payer}, {now}, now)
    accounts.hold(payer, 0, now)
    accounts.store()


def _left(wallet: WalletRow, amount_nusd: int) -> int | None:
    """How much an operation of that cost may use: what is not spent; if it costs something, less what is held."""
    available = available_nusd(wallet)
    return available if available is None or amount_nusd else available + wallet.held_nusd


def _check_budget(budget: BudgetLimit, period: PeriodRow, amount_nusd: int) -> None:
    left = budget.limit_nusd - period.spent_nusd - (period.held_nusd if amount_nusd else 0)
    if budget.hard and (amount_nusd > left or left <= 0):
        whose = "organisation" if budget.scope == "org" else f"{budget.scope} {budget.scope_id}"
        when = f"in {period.start:%Y-%m} (UTC)" if budget.period == "month" else "in total"
        remedy = "raise the budget" + (", or wait for the next month" if budget.period == "month" else "")
        limit = f"the budget of the {whose} {when}"
        figures = f"{dollars(period.spent_nusd)} of {dollars(budget.limit_nusd)} are spent"
        raise OutOfMoney(budget.scope, limit, figures, remedy, amount_nusd, left, period.held_nusd)


def burning_order(grant: GrantRow | CreditGrant) -> tuple[bool, bool, datetime, str]:
    """Sort key: promotions first, then by expiry; grants that never expire last."""
    return grant.kind != "promo", grant.expires_at is None, grant.expires_at or grant.created_at, grant.id


def _of_wallet(wallet: WalletRow) -> dict[str, Any]:
    return {"org_id": wallet.org_id, "balance_nusd": wallet.balance_nusd, "held_nusd": wallet.held_nusd}


def _of_period(period: PeriodRow) -> dict[str, Any]:
    names = ("budget_id", "start", "spent_nusd", "held_nusd")
    return {name: getattr(period, name) for name in names}
