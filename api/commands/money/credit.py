"""`weftd credit`, `weftd budget` and `weftd billing`: money, as the operator sees and moves it."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import click
from sqlalchemy.orm import Session
from weft.money import usd

from api.commands.changes import change, change_and_tell, organisation
from api.commands.places import Place, database_of, refuse, settings_of, where
from billing.money.budgets import PERIODS, Period, Scope, count, owns, remove_budget, set_budget, states
from billing.money.grants import GrantKind, give, take
from billing.money.ledger import refund_operation
from billing.money.wallets import MODES, Mode, available_nusd, wallet_of
from billing.payments.meters import change_mode
from billing.reports.reconcile import check
from store.database import audit
from store.database.db import Database
from store.people.organisations import NoSuch
from store.settings import PaymentsSettings, SettingsError

_NUSD = Decimal(10**9)
_MOST_USD = 4 * 10**9
_MOST_NUSD = _MOST_USD * 10**9


def _amount(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """An amount in dollars as exact nano-dollars."""
    if value is None:
        return None
    if not re.fullmatch(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)", value):
        raise click.BadParameter(f"{value[:80]!r} is not an amount of dollars, such as 12.50")
    amount = Decimal(value) * _NUSD
    if not 0 <= amount <= _MOST_NUSD or amount != int(amount):
        raise click.BadParameter(f"{value[:80]!r}: must be 0 to {_MOST_USD:,} dollars, with nine decimals at most")
    return int(amount)


def _refuse_beyond(session: Session, org_id: str, amount_nusd: int) -> None:
    """Refuse a movement after which the balance could not be stored."""
    balance_nusd = wallet_of(session, org_id).balance_nusd + amount_nusd
    if abs(balance_nusd) > _MOST_NUSD:
        raise click.BadParameter(
            f"the balance would be {usd(balance_nusd)}: it may be -{_MOST_USD:,} to {_MOST_USD:,} dollars"
        )


def _note(session: Session, org_id: str, event: str, target: str, **detail: object) -> None:
    audit.record(session, org_id=org_id, key_id=None, event=event, target=target, detail=dict(detail))


@click.group()
def credit() -> None:
    """Credit of organisations."""


@credit.command()
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.option("--usd", "amount_nusd", required=True, callback=_amount, help="Amount in dollars, for example 12.50.")
@click.option("--days", type=click.IntRange(1, 36500), help="Days until it expires; default: never.")
@click.option("--kind", type=click.Choice(["promo", "paid"]), default="promo", show_default=True)
@click.option("--memo", default="", help="Note for the ledger entry.")
def grant(place: Place, org: str, amount_nusd: int, days: int | None, kind: GrantKind, memo: str) -> None:
    """Give an organisation credit. Promotions, and what expires soonest, are used up first."""
    expires = datetime.now(UTC) + timedelta(days=days) if days is not None else None
    if amount_nusd == 0:
        refuse("--usd must be more than 0")

    def write(session: Session) -> str:
        org_id = organisation(session, org).id
        _refuse_beyond(session, org_id, amount_nusd)
        made = give(session, org_id, amount_nusd, kind=kind, expires_at=expires, memo=memo)
        _note(session, org_id, "credit_granted", made.id, amount_nusd=amount_nusd, kind=kind)
        return f"{org}\tbalance {usd(wallet_of(session, org_id).balance_nusd)}"

    change_and_tell(place, write)


@credit.command("take")
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.option("--usd", "amount_nusd", required=True, callback=_amount, help="Amount in dollars, for example 12.50.")
@click.option("--memo", required=True, help="Note for the ledger entry.")
def take_(place: Place, org: str, amount_nusd: int, memo: str) -> None:
    """Take money out of an organisation's balance, even below zero: money that was returned in another way, or given by
    mistake. Invoices of usage stay unchanged."""
    if amount_nusd == 0:
        refuse("--usd must be more than 0")

    def write(session: Session) -> str:
        org_id = organisation(session, org).id
        _refuse_beyond(session, org_id, -amount_nusd)
        entry = take(session, org_id, amount_nusd, memo)
        _note(session, org_id, "credit_taken", entry.ref_id, amount_nusd=amount_nusd)
        return f"{org}\tbalance {usd(wallet_of(session, org_id).balance_nusd)}"

    change_and_tell(place, write)


@credit.command()
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.option("--operation", "operation_id", required=True, help="Request id of the operation.")
@click.option("--memo", default="", help="Note for the ledger entry.")
def refund(place: Place, org: str, operation_id: str, memo: str) -> None:
    """Give back what an operation has cost. Its metered usage stays recorded."""

    def write(session: Session) -> int | None:
        org_id = organisation(session, org).id
        entry = refund_operation(session, org_id, operation_id, memo)
        if entry is None:
            return None
        _note(session, org_id, "credit_refunded", operation_id, amount_nusd=entry.amount_nusd)
        return entry.amount_nusd

    amount = change(place, write)
    if amount is None:
        refuse(f"operation {operation_id!r} of {org} was refunded before, or has cost nothing")
    click.echo(f"{org}\trefunded {usd(amount)}")


@click.group()
def budget() -> None:
    """Limits on spending."""


@budget.command("set")
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.option("--usd", "limit_nusd", required=True, callback=_amount, help="Amount in dollars, for example 12.50.")
@click.option("--project", help="Limit this project of the organisation alone.")
@click.option("--key", "key_id", type=int, help="Limit this key of it alone, by its number in weftd key list.")
@click.option("--period", type=click.Choice(PERIODS), default="month", show_default=True)
@click.option("--soft", is_flag=True, help="Refuse nothing; only record that it was reached.")
def set_(
    place: Place, org: str, limit_nusd: int, project: str | None, key_id: int | None, period: Period, soft: bool
) -> None:
    """Make or change the budget of an organisation, or of a project or key of it."""
    if project is not None and key_id is not None:
        refuse("give --project or --key, not both: a budget limits one of them")

    def meant(session: Session) -> tuple[str, Scope, str]:
        org_id = organisation(session, org).id
        scope: Scope = "project" if project is not None else "key" if key_id is not None else "org"
        scope_id = project or (str(key_id) if key_id is not None else org_id)
        if not owns(session, org_id, scope, scope_id):
            raise NoSuch(f"no {scope} {scope_id!r} in {org}")
        return org_id, scope, scope_id

    def write(session: Session) -> str:
        org_id, scope, scope_id = meant(session)
        made = set_budget(session, org_id, scope, scope_id, period, limit_nusd, hard=not soft, counted=counted)
        _note(session, org_id, "budget_set", f"{scope}:{scope_id}", limit_nusd=limit_nusd, period=period, hard=not soft)
        return made.id

    with database_of(place) as database, database.read() as session:
        counted = count(session, *meant(session), period)
    change_and_tell(place, write)


@budget.command("list")
@where
@click.option("--org", required=True, help="Name of the organisation.")
def list_(place: Place, org: str) -> None:
    """Show the budgets of an organisation, with what is spent, held and left of each."""
    with database_of(place) as database, database.read() as session:
        for state in states(session, organisation(session, org).id):
            of = state.budget
            spent, held, left = (usd(n) for n in (state.spent_nusd, state.held_nusd, state.left_nusd))
            kind = "hard" if of.hard else "soft"
            which = f"{of.id}\t{of.scope} {of.scope_id}\t{of.period}\t{kind}"
            click.echo(f"{which}\tlimit {usd(of.limit_nusd)}\tspent {spent}\theld {held}\tleft {left}")


@budget.command()
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.argument("budget_id")
def remove(place: Place, org: str, budget_id: str) -> None:
    """Remove a budget."""

    def write(session: Session) -> bool:
        org_id = organisation(session, org).id
        removed = remove_budget(session, org_id, budget_id)
        if removed:
            _note(session, org_id, "budget_removed", budget_id)
        return removed

    if not change(place, write):
        refuse(f"no budget {budget_id!r} of {org}: see weftd budget list")


@click.group()
def billing() -> None:
    """How organisations pay; check the books."""


@billing.command()
@where
@click.option("--org", required=True, help="Name of the organisation.")
@click.argument("mode", type=click.Choice(MODES))
@click.option("--overdraft", "overdraft_nusd", callback=_amount, default="0", help="How many dollars it may owe.")
def mode(place: Place, org: str, mode: Mode, overdraft_nusd: int) -> None:
    """Set how an organisation pays: before (prepaid), after (postpaid, up to --overdraft), or without a limit. If
    payments are enabled, a postpaid one is made a customer at Stripe first."""

    def write(session: Session) -> str:
        org_id = organisation(session, org).id
        wallet = change_mode(session, org_id, mode, overdraft_nusd, datetime.now(UTC))
        _note(session, org_id, "wallet_mode_set", org_id, mode=mode, overdraft_nusd=overdraft_nusd)
        left = available_nusd(wallet)
        if left is not None and left <= 0:
            needed = "give it credit (weftd credit grant) or an --overdraft"
            click.echo(f"weftd: all that {org} asks for is refused until it may spend something: {needed}", err=True)
        return f"{org}\t{mode}\tbalance {usd(wallet.balance_nusd)}\tavailable {'any' if left is None else usd(left)}"

    payments = settings_of(place).payments
    if mode == "postpaid" and payments.enabled:
        with database_of(place) as database:
            _enrol(database, payments, org)
    change_and_tell(place, write)


def _enrol(database: Database, payments: PaymentsSettings, org: str) -> None:
    from stripe import APIConnectionError, StripeError

    from billing.payments.client import stripe_client
    from billing.payments.customers import enrol

    with database.read() as session:
        org_id = organisation(session, org).id
    try:
        enrol(stripe_client(payments), database, org_id, payments.price_ids, datetime.now(UTC))
    except SettingsError as error:
        refuse(error)
    except StripeError as error:
        refuse(
            f"{org} could not be made a customer at Stripe ({type(error).__name__}: {error}): its mode is what it was; "
            "try again",
            1 if isinstance(error, APIConnectionError) else 2,
        )


@billing.command()
@where
@click.option("--org", help="Only this organisation.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def reconcile(place: Place, org: str | None, as_json: bool) -> None:
    """Check that the books agree with each other. Exit code 1 if anything differs by a nano-dollar."""
    with database_of(place) as database:
        with database.read() as session:
            org_id = organisation(session, org).id if org else None
        drifts = check(database, org_id)
    if as_json:
        click.echo(json.dumps({"drifts": [vars(drift) for drift in drifts]}))
    else:
        click.echo("\n".join(map(str, drifts)) or "the books agree")
    if drifts:
        sys.exit(1)
