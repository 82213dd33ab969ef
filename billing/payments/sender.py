"""Sends the outbox to Stripe, each row with exactly one effect even if requests or answers are lost.

Stripe remembers an identifier for at least 24 hours, so until 23 hours after the first attempt a row is simply sent
again under the same identifier. Later it could be counted twice; so Stripe's own sum of the period decides whether the
first attempt arrived. Rows of one organisation and meter are sent one at a time and in order: Stripe takes one call at
a time for a customer's meter, and only so does its sum tell which rows arrived.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from billing.money.alerts import raise_alert, resolve_alert
from billing.payments.meters import event_name, put_into_outbox
from billing.payments.waits import is_due
from store.tables import Organisation, StripeOutbox, Wallet

if TYPE_CHECKING:
    import stripe
    from stripe import StripeClient

#: No attempt begins later than this after the first one.
RESEND_WINDOW = timedelta(hours=23)
#: How long a sender has a row for itself: longer than the client's timeouts.
CLAIM = timedelta(seconds=120)
#: Waits after a failure, doubled each time.
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 900.0
#: Wait after a refusal: an invalid request, or one that our key does not permit.
REFUSED_WAIT = timedelta(hours=1)


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt; `state` is sent, again (after `wait`) or refused (an alert is raised)."""

    state: str
    error: str = ""
    wait: timedelta = timedelta(0)


def claim(session: Session, now: datetime, limit: int) -> list[StripeOutbox]:
    """Take rows that may be sent now, at most one of each organisation and meter. Call it in a write of its own that is
    committed before anything is sent, so that the time of the first attempt is known even after a crash."""
    row = StripeOutbox
    heads = select(func.min(row.id)).where(row.state != "sent").group_by(row.org_id, row.meter)
    query = select(row).where(row.id.in_(heads), row.state == "pending", is_due(row.next_attempt_at, now))
    query = query.order_by(row.next_attempt_at, row.id).limit(limit).with_for_update(skip_locked=True)
    claimed = []
    for found in session.scalars(query):
        if found.first_sent_at is not None:  # of an earlier attempt, whose clock may have been ahead
            found.first_sent_at = min(found.first_sent_at, now)
        if found.first_sent_at is not None and now - found.first_sent_at >= RESEND_WINDOW:
            found.state, found.last_error = "reconcile", "not confirmed within the window of its identifier"
            continue
        found.first_sent_at = found.first_sent_at or now
        found.last_sent_at, found.next_attempt_at = now, now + CLAIM
        found.attempts += 1
        claimed.append(found)
    return claimed


def restored(session: Session, made_at: datetime, now: datetime) -> None:
    """After a restore of the backup made at `made_at`: rows that waited then for a first attempt may have had it since,
    so they are treated as if they had had it at that time. Usage that was not in the outbox then may have been sent
    since under other identifiers: it is put there now, and Stripe's sum decides."""
    row, org = StripeOutbox, Organisation
    waited = update(row).where(row.state == "pending", row.first_sent_at.is_(None))
    session.execute(waited.values(first_sent_at=made_at, last_sent_at=now))
    metered = select(org.id, org.stripe_customer_id).join(Wallet, Wallet.org_id == org.id)
    metered = metered.where(Wallet.mode == "postpaid", org.stripe_customer_id.is_not(None))
    for org_id, customer_id in session.execute(metered).all():
        put_into_outbox(session, org_id, str(customer_id), made_at)
    session.flush()
    session.execute(waited.values(first_sent_at=made_at - RESEND_WINDOW, last_sent_at=now))


def send(client: StripeClient, claimed: StripeOutbox, now: Callable[[], datetime]) -> Verdict:
    """Make one attempt. There is no Idempotency-Key: Stripe would then repeat a stored error for a day."""
    import stripe

    assert claimed.first_sent_at is not None
    if now() >= claimed.first_sent_at + RESEND_WINDOW:  # this process was suspended since the claim
        return Verdict("again", "too late for its identifier")
    try:
        client.v1.billing.meter_events.create(
            {
                "event_name": event_name(claimed.meter),
                "identifier": claimed.identifier,
                "timestamp": int(claimed.occurred_at.timestamp()),
                "payload": {"stripe_customer_id": claimed.customer_id, "value": str(claimed.value_uusd)},
            }
        )
    except stripe.InvalidRequestError as error:
        return Verdict("sent") if _already_there(error) else Verdict("refused", _said(error), REFUSED_WAIT)
    except (stripe.AuthenticationError, stripe.PermissionError) as error:
        return Verdict("refused", _said(error), REFUSED_WAIT)
    except stripe.StripeError as error:  # 429, 5xx, no answer: it may or may not have arrived
        return Verdict("again", _said(error), _backoff(claimed.attempts, error))
    return Verdict("sent")


def settle(session: Session, claimed: StripeOutbox, verdict: Verdict, now: datetime) -> None:
    """Store the outcome of an attempt to send. Must be called in a write."""
    row = session.get_one(StripeOutbox, claimed.id, with_for_update=True)
    if row.state == "sent":
        return
    row.last_error = verdict.error or None
    if verdict.state == "sent":
        mark_sent(session, row, now)
        return
    row.next_attempt_at = now + verdict.wait
    if verdict.state == "refused":
        raise_alert(
            session,
            kind="stripe_refused",
            ref=row.identifier,
            message=f"Stripe refuses meter event {row.identifier}, and later ones wait for it: {verdict.error}",
            now=now,
        )


def mark_sent(session: Session, row: StripeOutbox, now: datetime) -> None:
    row.state, row.sent_at, row.last_error = "sent", now, None
    for kind in ("stripe_refused", "stripe_unclear"):
        resolve_alert(session, kind=kind, ref=row.identifier, now=now)


def _already_there(error: stripe.InvalidRequestError) -> bool:
    return error.http_status == 400 and "already exists with identifier" in str(error.user_message or error)


def _said(error: stripe.StripeError) -> str:
    return f"{type(error).__name__} {error.http_status or ''}: {error.user_message or error}"[:500]


def _backoff(attempts: int, error: stripe.StripeError) -> timedelta:
    """The wait before the next attempt: doubling with jitter, and at least what Stripe asks for."""
    wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(attempts - 1, 20)) * random.uniform(0.5, 1.0)
    asked = (error.headers or {}).get("retry-after", "")
    return timedelta(seconds=max(wait_s, min(float(asked), LONGEST_WAIT_S) if str(asked).isdecimal() else 0.0))
