"""Stripe's jobs: send meter events, handle webhooks, close months, compare sums. They do nothing unless payments are
enabled."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.payments import customers, events, inbox, invoices, meters, sender, summaries
from billing.payments.client import stripe_client
from billing.payments.periods import period_before, period_of
from scheduler.jobs.registry import JobContext, Result, job
from scheduler.jobs.running import ask
from store.tables import JobRun, StripeOutbox

if TYPE_CHECKING:
    from stripe import StripeClient, StripeError

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")

#: Calls to Stripe at a time, each for another customer.
SENDERS = 8
#: The most rounds that one run sends; the rest is sent by the next run.
ROUNDS = 50
#: The most webhooks that one run handles.
WEBHOOKS = 200


@job("put_meter_events", every_s=1800)  # Stripe accepts a month's last usage up to an hour after the month's end
def put_meter_events(context: JobContext) -> Result:
    """Put the usage since the last run into the outbox, organisation by organisation. Each is first made a customer
    with a subscription, because Stripe invoices a meter only from the start of the subscription."""
    settings, now = context.settings.payments, context.now()
    if not settings.enabled:
        return {}
    with context.database.read() as session:
        organisations = meters.postpaid_organisations(session)
    client = stripe_client(settings)

    def put_one(org_id: str) -> int:
        customer_id = customers.enrol(client, context.database, org_id, settings.price_ids, now)
        put = partial(meters.put_into_outbox, org_id=org_id, customer_id=customer_id, now=now)
        return context.database.write_now(put)

    put, refused = _each(organisations, put_one)
    if sum(put):
        context.database.write_now(partial(ask, name="send_meter_events", now=now))
    if refused:
        raise refused[0]
    return {"put": sum(put)}


def _each(things: Iterable[T], work: Callable[[T], R]) -> tuple[list[R], list[StripeError]]:
    """Do `work` for each item. If Stripe refuses one (its customer was deleted there), the others still go on; the
    caller raises the error at the end, so that the job is seen to fail."""
    import stripe  # slow to import

    done, refused = list[R](), list[stripe.StripeError]()
    for thing in things:
        try:
            done.append(work(thing))
        except (stripe.InvalidRequestError, stripe.IdempotencyError, stripe.APIError) as error:
            log.exception("Stripe refuses what concerns %s", thing)
            refused.append(error)
    return done, refused


@job("send_meter_events", every_s=60)
def send_meter_events(context: JobContext) -> Result:
    """Send the outbox to Stripe until nothing is due."""
    if not context.settings.payments.enabled:
        return {}
    client = stripe_client(context.settings.payments)
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(SENDERS, thread_name_prefix="stripe") as pool:
        for _ in range(ROUNDS):
            claimed = context.database.write_now(partial(sender.claim, now=context.now(), limit=SENDERS))
            if not claimed:
                break
            states = list(pool.map(lambda row: _send(context, client, row), claimed))
            counts.update(states)
            if "sent" not in states:
                break  # Stripe does not answer, or refuses us for now: the next run tries again
    counts.update(_decide(context, client))
    return dict(counts)


def _send(context: JobContext, client: StripeClient, claimed: StripeOutbox) -> str:
    verdict = sender.send(client, claimed, context.now)
    context.database.write_now(partial(sender.settle, claimed=claimed, verdict=verdict, now=context.now()))
    return verdict.state


def _decide(context: JobContext, client: StripeClient) -> list[str]:
    """Ask Stripe about rows that are too old to be sent again."""
    with context.database.read() as session:
        rows = {row.identifier: row for row in summaries.unclear(session, context.now())}
    if not rows:
        return []
    ids = summaries.meter_ids(client)

    def decide_one(identifier: str) -> str:
        row = rows[identifier]
        counted = summaries.counted_uusd(client, ids, row.meter, row.customer_id, row.period_start)
        decide = partial(summaries.decide, row_id=row.id, counted=counted, now=context.now())
        return f"found_{context.database.write_now(decide)}"

    states, refused = _each(rows, decide_one)
    if refused:
        raise refused[0]
    return states


@job("process_webhooks", every_s=60)
def process_webhooks(context: JobContext) -> Result:
    """Handle the webhooks in the inbox. If one fails the others go on, unless Stripe does not answer at all."""
    if not context.settings.payments.enabled:
        return {}
    client = stripe_client(context.settings.payments)
    counts: Counter[str] = Counter()
    with context.database.read() as session:
        waiting = inbox.due(session, context.now(), WEBHOOKS)
    for row in waiting:
        state = _act(context, client, row.event_id, dict(row.payload))
        counts[state] += 1
        if state == "away":  # each further one would wait for a timeout
            break
    return dict(counts)


def _act(context: JobContext, client: StripeClient, event_id: str, event: dict[str, object]) -> str:
    import stripe

    try:
        effect, now = events.effect_of(client, event), context.now()
        context.database.write_now(lambda session: inbox.done(session, event_id, effect(session, now), now))
        return "processed"
    except Exception as error:
        log.warning("Stripe event %s is tried again: %s", event_id, type(error).__name__)
        context.database.write_now(partial(inbox.failed, event_id=event_id, error=error, now=context.now()))
        return "away" if isinstance(error, stripe.APIConnectionError) else "failed"


@job("ask_for_missed_events", every_s=86_400)
def ask_for_missed_events(context: JobContext) -> Result:
    """Ask Stripe for events whose webhooks never arrived: a payment that was made must be credited."""
    if not context.settings.payments.enabled:
        return {}
    client, now = stripe_client(context.settings.payments), context.now()
    with context.database.read() as session:
        asked_at = session.scalar(select(JobRun.succeeded_at).where(JobRun.name == "ask_for_missed_events"))
    kept = 0
    for page in inbox.missed(client, events.TYPES, asked_at, now):
        kept += context.database.write_now(partial(_keep, page=page, now=now))
    if kept:
        log.warning("%d events of Stripe had never arrived", kept)
        context.database.write_now(partial(ask, name="process_webhooks", now=now))
    return {"kept": kept}


def _keep(session: Session, page: list[dict[str, Any]], now: datetime) -> int:
    return sum(inbox.keep(session, event, now) for event in page)


@job("close_invoices", every_s=3600, final=True)
def close_invoices(context: JobContext) -> Result:
    """Close the last month of each organisation with usage in it, and months that could not be closed in time. A month
    that a fast clock closed too early is continued."""
    if not context.settings.payments.enabled:
        return {}
    now = context.now()
    last = period_before(period_of(now))
    with context.database.read() as session:
        months = meters.unclosed(session, last)
    if reopened := context.database.write_now(partial(invoices.reopen, now=now)):
        log.warning("%d months that go on had been closed, by a clock that was ahead: they are open again", reopened)
    closed = sum(invoices.close(context.database, org_id, start, now) for org_id, start in months)
    return {"closed": closed}


@job("compare_with_stripe", every_s=86_400)
def compare_with_stripe(context: JobContext) -> Result:
    """Compare Stripe's sums of this month and the last with the usage that it has confirmed to us."""
    if not context.settings.payments.enabled:
        return {}
    client = stripe_client(context.settings.payments)
    now = context.now()
    with context.database.read() as session:
        states = summaries.cursors(session, period_before(period_of(now)))
    ids = summaries.meter_ids(client) if states else {}

    def compare_one(state: summaries.CursorState) -> bool:
        counted = summaries.counted_uusd(client, ids, state.meter, state.customer_id, state.period_start)
        compare = partial(summaries.compare, state=state, counted=counted, now=now)
        return context.database.write_now(compare) != 0

    differ, refused = _each(states, compare_one)
    if refused:
        raise refused[0]
    return {"compared": len(states), "differ": sum(differ)}
