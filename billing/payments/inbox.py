"""Webhooks: verified and stored while Stripe waits, processed later (`billing.payments.events`).

An event that arrives twice is stored once, by its id. One that cannot be processed yet is retried until it can. One
that never arrived, because nobody answered for days or a backup was restored, is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.money.alerts import raise_alert, resolve_alert
from billing.payments.invoices import CLOSE_BY, NotClosedHere
from billing.payments.waits import is_due
from store.database.bulk import insert_into
from store.tables import StripeWebhookEvent

if TYPE_CHECKING:
    from stripe import StripeClient
    from stripe.params import EventListParams

#: The oldest signature that is accepted.
TOLERANCE_S = 300
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 3600.0
#: After this many failed attempts an alert is raised; attempts go on.
ATTEMPTS_BEFORE_ALERT = 6
#: Events are asked for from LATE before the last time of asking (Stripe tries to deliver for three days), and no
#: further back than LISTED (it lists events of the last thirty).
LATE, LISTED = timedelta(days=4), timedelta(days=30)
#: How many events a page of that list has.
PAGE = 100


class BadWebhook(ValueError):
    """The request is not signed by Stripe with a secret of ours, too old, or not an event."""


def verify(body: bytes, signature: str, secrets: Sequence[SecretStr]) -> dict[str, Any]:
    """The event in a webhook's raw body, signed with one of the secrets. Raises BadWebhook."""
    import stripe

    for secret in secrets:
        try:
            stripe.WebhookSignature.verify_header(body.decode(), signature, secret.get_secret_value(), TOLERANCE_S)
            break
        except (stripe.SignatureVerificationError, ValueError):  # ValueError: the body is not UTF-8
            continue
    else:
        raise BadWebhook("stripe-signature: not a valid signature of this body by a secret of this server")
    try:
        event = json.loads(body)
    except json.JSONDecodeError:
        raise BadWebhook("the body is not JSON") from None
    if not (isinstance(event, dict) and _text(event.get("id")) and _text(event.get("type"))):
        raise BadWebhook("the body is not an event: it needs id and type")
    return event


def _text(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= 128


def keep(session: Session, event: dict[str, Any], now: datetime) -> bool:
    """Store an event; call it in a write. False if it was stored before."""
    row = insert_into(session, StripeWebhookEvent).values(
        event_id=event["id"], type=event["type"], payload=event, received_at=now, next_attempt_at=now
    )
    return session.scalar(row.on_conflict_do_nothing().returning(StripeWebhookEvent.event_id)) is not None


def missed(
    client: StripeClient, types: Sequence[str], asked_at: datetime | None, now: datetime
) -> Iterator[list[dict[str, Any]]]:
    """Events since the last such question, page by page, including earlier ones that could still have been delivered
    then; most are stored already. A last question in the future, by a fast clock, does not count."""
    since = now - LISTED if asked_at is None or asked_at > now else max(now - LISTED, asked_at - LATE)
    params: EventListParams = {"created": {"gte": int(since.timestamp())}, "types": list(types), "limit": PAGE}
    page = client.v1.events.list(params)
    while page.data:
        yield [event.to_dict() for event in page.data]
        page = page.next_page()


def due(session: Session, now: datetime, limit: int) -> list[StripeWebhookEvent]:
    row = StripeWebhookEvent
    query = select(row).where(row.processed_at.is_(None), is_due(row.next_attempt_at, now))
    return list(session.scalars(query.order_by(row.next_attempt_at, row.received_at).limit(limit)))


def done(session: Session, event_id: str, outcome: str, now: datetime) -> None:
    """Mark an event as processed, in the transaction of its effect."""
    row = session.get_one(StripeWebhookEvent, event_id)
    row.processed_at, row.outcome = now, outcome[:512]
    resolve_alert(session, kind="webhook_stuck", ref=event_id, now=now)


def failed(session: Session, event_id: str, error: Exception, now: datetime) -> None:
    """Put off an event. An invoice that is there before its month is closed is no reason for an alert yet."""
    row = session.get_one(StripeWebhookEvent, event_id)
    row.attempts += 1
    said = f"{type(error).__name__}: {error}"
    row.outcome = said[:512]
    row.next_attempt_at = now + timedelta(seconds=min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(row.attempts, 20)))
    early = isinstance(error, NotClosedHere) and now < row.received_at + CLOSE_BY
    if row.attempts >= ATTEMPTS_BEFORE_ALERT and not early:
        message = f"Stripe event {event_id} ({row.type}) cannot be acted on: {said}"
        raise_alert(session, kind="webhook_stuck", ref=event_id, message=message, now=now)
