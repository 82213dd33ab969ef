"""The API in front of the payments: what an organisation asks, and what Stripe tells."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient

from scheduler.jobs.payments import process_webhooks
from store.tables import Alert
from tests.billing.payments.kit import Payments
from tests.fakestripe.server import WEBHOOK_SECRET
from tests.fakestripe.webhooks import signed


class Door:
    """The API in front of the payments' database, asked as an organisation."""

    def __init__(self, payments: Payments, http: TestClient, key: str, org_id: str) -> None:
        self.payments = payments
        self.http = http
        self.org_id = org_id
        self._headers = {"x-api-key": key}

    def topup(self, amount: str, status: int = 200, **headers: str) -> Any:
        reply = self.http.post(
            "/api/v1/weft/billing/topups", json={"amount_usd": amount}, headers={**self._headers, **headers}
        )
        assert reply.status_code == status, reply.text
        return reply.json()

    def webhook(self, event: Any, secret: str = WEBHOOK_SECRET, age_s: float = 0.0) -> Any:
        body, signature = signed(event, secret, age_s=age_s)
        return self.http.post("/api/v1/stripe/webhook", content=body, headers={"stripe-signature": signature})

    def deliver(self, *events: Any) -> None:
        """Deliver webhooks and act on them."""
        for event in events:
            assert self.webhook(event).status_code == 200
        process_webhooks(self.payments.context)

    @property
    def told(self) -> list[Any]:
        """Take the events that Stripe has to tell."""
        events, self.payments.fake.stripe.events = self.payments.fake.stripe.events, []
        return events

    def ledger(self) -> list[tuple[str, int]]:
        return self.payments.ledger(self.org_id)

    def paid(self, amount: str = "25") -> Any:
        """Finish a top-up, of which Stripe has not told us yet."""
        return self.payments.fake.stripe.finish_checkout(self.topup(amount)["id"])

    def alerts(self) -> list[str]:
        with self.payments.database.read() as session:
            return [alert.kind for alert in session.query(Alert).order_by(Alert.id)]

    def open_alerts(self) -> list[tuple[str, str]]:
        """Their kinds and messages."""
        with self.payments.database.read() as session:
            query = session.query(Alert).filter_by(resolved_at=None).order_by(Alert.id)
            return [(alert.kind, alert.message) for alert in query]


USD = 10**9
