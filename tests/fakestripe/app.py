"""The fake's HTTP: the part of Stripe's API that Weft calls, with authentication, idempotency keys, rate limits and
faults."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from stripe import params as v1
from stripe.params import billing, checkout

from tests.fakestripe.contract import BadRequest, Form, check_object, check_params, parse_form
from tests.fakestripe.state import DAY_S, NotFound, Stripe

#: lost: the request never arrives. unanswered: it arrives, and its answer is lost on the way back.
Fault = Literal["ok", "lost", "unanswered", "429", "500", "403"]
Handler = Callable[[Stripe, Form, str], Form]


class Dropped(Response):
    """Not an answer: the connection breaks first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"100")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


class Front:
    """One account over HTTP. Each meter event uses up one of `faults`; while it is `broken`, nothing else can be
    made; `key` is the API key it accepts."""

    key = "rk_test_fake"

    def __init__(self, stripe: Stripe) -> None:
        self.start_with(stripe)

    def start_with(self, stripe: Stripe) -> None:
        """Forget everything, and serve this account."""
        self.stripe = stripe
        self.faults: deque[Fault] = deque()
        self.broken = False
        self.latency_s = 0.0
        #: How many meter events were refused because another one of the same customer was under way.
        self.collisions = 0
        self.requests: list[tuple[str, str, Form]] = []
        self._in_flight: set[tuple[str, str]] = set()
        self._answers: dict[str, tuple[float, str, int, Form]] = {}

    def app(self) -> Starlette:
        return Starlette(routes=[Route(path, self._route(table), methods=list(table)) for path, table in API.items()])

    def _route(self, table: dict[str, tuple[type | None, Handler]]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if request.headers.get("authorization") != f"Bearer {self.key}":
                return _error(401, "Invalid API Key provided", "invalid_request_error")
            declared, handler = table[request.method]
            text = (await request.body()).decode() if request.method == "POST" else request.url.query
            form = parse_form(text)
            self.requests.append((request.method, request.url.path, form))
            if request.url.path == "/v1/billing/meter_events":
                return await self._metered(form, declared, handler)
            return self._keyed(request, form, declared, handler)

        return answer

    async def _metered(self, form: Form, declared: type | None, handler: Handler) -> Response:
        fault = self.faults.popleft() if self.faults else "ok"
        if fault == "lost":
            return Dropped()
        if fault in ("429", "500", "403"):
            return _error(int(fault), "injected", "api_error")
        flight = (form.get("event_name", ""), str(form.get("payload", {}).get("stripe_customer_id")))
        if flight in self._in_flight:
            self.collisions += 1
            return _error(429, "Another request for this customer's meter is in progress", "invalid_request_error")
        self._in_flight.add(flight)
        try:
            await asyncio.sleep(self.latency_s)
            status, body = self._do(form, declared, handler, "")
        finally:
            self._in_flight.discard(flight)
        return Dropped() if fault == "unanswered" else JSONResponse(body, status)

    def _keyed(self, request: Request, form: Form, declared: type | None, handler: Handler) -> Response:
        """Answer all repeats of an idempotency key with its first answer for a day, even an error, and refuse
        a different request with the same key. Answers to invalid parameters are not kept
        (docs.stripe.com/api/idempotent_requests)."""
        key = request.headers.get("idempotency-key") if request.method == "POST" else None
        same = f"{request.url.path} {json.dumps(form, sort_keys=True)}"
        at, asked, status, body = self._answers.get(key or "", (0.0, "", 0, {}))
        if key is not None and status and self.stripe.now - at < DAY_S:
            if asked != same:
                message = (
                    "Keys for idempotent requests can only be used with the same parameters they were first used with"
                )
                return _error(400, message, "idempotency_error")
            return JSONResponse(body, status, {"idempotent-replayed": "true"})
        try:
            check_params(form, declared)
        except BadRequest as error:
            return JSONResponse(error.body, 400)
        if self.broken and request.method == "POST":
            status, body = 500, {"error": {"type": "api_error", "message": "injected"}}
        else:
            status, body = self._do(form, declared, handler, request.path_params.get("id", ""))
        if key is not None:
            self._answers[key] = (self.stripe.now, same, status, body)
        return JSONResponse(body, status)

    def _do(self, form: Form, declared: type | None, handler: Handler, thing_id: str) -> tuple[int, Form]:
        try:
            check_params(form, declared)
            return 200, handler(self.stripe, form, thing_id)
        except BadRequest as error:
            return 400, error.body
        except NotFound as error:
            missing = {"type": "invalid_request_error", "code": "resource_missing"}
            return 404, {"error": {**missing, "message": f"No such object: {error}"}}


def _error(status: int, message: str, kind: str) -> Response:
    return JSONResponse({"error": {"type": kind, "message": message}}, status)


def _list(rows: list[Form]) -> Form:
    return {"object": "list", "data": rows, "has_more": False, "url": "/v1/list"}


def _customer(stripe: Stripe, form: Form, _id: str) -> Form:
    return stripe.add(
        "cus", "customer", name=form.get("name"), metadata=form.get("metadata", {}), created=int(stripe.now)
    )


def _search_customers(stripe: Stripe, form: Form, _id: str) -> Form:
    """Customers with one value in their metadata, but not those of the last minute: Stripe documents this delay."""
    asked = re.fullmatch(r"metadata\['(\w+)'\]:'(\w+)'", form["query"])
    if asked is None:
        raise BadRequest("We were unable to parse your search query", param="query")
    name, value = asked.groups()
    there = [row for row in stripe.all("customer") if row.get("created", 0) <= stripe.now - 60]
    rows = [row for row in there if row.get("metadata", {}).get(name) == value]
    return {"object": "search_result", "data": rows, "has_more": False, "url": "/v1/customers/search"}


def _meter(stripe: Stripe, form: Form, _id: str) -> Form:
    if any(row["event_name"] == form["event_name"] for row in stripe.all("billing.meter")):
        raise BadRequest(f"An active meter with event name {form['event_name']} exists already")
    return stripe.add(
        "mtr",
        "billing.meter",
        event_name=form["event_name"],
        display_name=form["display_name"],
        status="active",
        default_aggregation=form["default_aggregation"],
    )


def _known_customer(stripe: Stripe, form: Form) -> None:
    if form.get("customer") not in stripe.objects:
        message = f"No such customer: '{form.get('customer')}'"
        raise BadRequest(message, code="resource_missing", param="customer")


def _summaries(stripe: Stripe, form: Form, meter_id: str) -> Form:
    start, end = int(form["start_time"]), int(form["end_time"])
    if start % 60 or end % 60:
        raise BadRequest("start_time and end_time must be aligned with minute boundaries")
    meter = stripe.get("billing.meter", meter_id)
    _known_customer(stripe, form)
    total = stripe.total(meter["event_name"], form["customer"], start, end, lag_s=stripe.lag_s)
    summary = {
        "id": f"mtrusg_{meter_id}_{start}",
        "object": "billing.meter_event_summary",
        "aggregated_value": float(total),
        "start_time": start,
        "end_time": end,
        "livemode": False,
        "meter": meter_id,
    }
    return _list([check_object(summary)])


def _checkout(stripe: Stripe, form: Form, _id: str) -> Form:
    stripe.get("customer", form["customer"])
    cents = sum(int(item["quantity"]) * int(item["price_data"]["unit_amount"]) for item in form["line_items"])
    session = stripe.add(
        "cs",
        "checkout.session",
        mode=form["mode"],
        customer=form["customer"],
        client_reference_id=form.get("client_reference_id"),
        metadata=form.get("metadata", {}),
        amount_total=cents,
        currency=form["line_items"][0]["price_data"]["currency"],
        status="open",
        payment_status="unpaid",
        payment_intent=None,
        url="https://checkout.example/pay",
    )
    stripe.payment_metadata[session["id"]] = form.get("payment_intent_data", {}).get("metadata", {})
    return session


def _subscription(stripe: Stripe, form: Form, _id: str) -> Form:
    _known_customer(stripe, form)
    items = [{"object": "subscription_item", "price": stripe.get("price", item["price"])} for item in form["items"]]
    return stripe.add(
        "sub",
        "subscription",
        customer=form["customer"],
        status="active",
        metadata=form.get("metadata", {}),
        billing_cycle_anchor=int(form["billing_cycle_anchor"]),
        items=_list(items),
        created=int(stripe.now),
    )


def _cancelled(stripe: Stripe, _form: Form, subscription_id: str) -> Form:
    """Cancel a subscription. Only once: a second cancelling does not find it."""
    subscription = stripe.get("subscription", subscription_id)
    if subscription["status"] == "canceled":
        raise NotFound(subscription_id)
    subscription["status"] = "canceled"
    return subscription


def _subscriptions(stripe: Stripe, form: Form, _id: str) -> Form:
    """A customer's subscriptions without the cancelled ones: Stripe lists those only if asked for their status."""
    _known_customer(stripe, form)
    rows = [row for row in stripe.all("subscription") if row["customer"] == form.get("customer")]
    return _list([row for row in rows if row["status"] != "canceled"])


def _price(stripe: Stripe, form: Form, _id: str) -> Form:
    if any(row["lookup_key"] == form.get("lookup_key") for row in stripe.all("price")):
        raise BadRequest("A price with this lookup_key exists already")
    stripe.get("billing.meter", form["recurring"]["meter"])
    return stripe.add(
        "price",
        "price",
        currency=form["currency"],
        lookup_key=form.get("lookup_key"),
        recurring=form["recurring"],
        unit_amount_decimal=form["unit_amount_decimal"],
    )


def _get(kind: str) -> Handler:
    return lambda stripe, _form, thing_id: stripe.get(kind, thing_id)


def _thin(stripe: Stripe, _form: Form, event_id: str) -> Form:
    if event_id not in stripe.thin:
        raise NotFound(event_id)
    return stripe.thin[event_id]


def _prices(stripe: Stripe, form: Form, _id: str) -> Form:
    return _list([row for row in stripe.all("price") if row["lookup_key"] in form.get("lookup_keys", [])])


def _events(stripe: Stripe, form: Form, _id: str) -> Form:
    """The events of the last thirty days, the newest first."""
    since = max(int(form["created"]["gte"]), stripe.now - 30 * DAY_S)
    if len(form["types"]) > 20:
        raise BadRequest("You can pass up to 20 event names", param="types")
    found = [event for event in stripe.told if event["created"] >= since and event["type"] in form["types"]]
    found.reverse()
    places = {event["id"]: place for place, event in enumerate(found)}
    start = places[form["starting_after"]] + 1 if "starting_after" in form else 0
    end = start + int(form["limit"])
    page = _list([check_object(event) for event in found[start:end]])
    return {**page, "url": "/v1/events", "has_more": end < len(found)}


#: By path and method: the type of the parameters, and the function that answers.
API: dict[str, dict[str, tuple[type | None, Handler]]] = {
    "/v1/customers": {"POST": (v1.CustomerCreateParams, _customer)},
    "/v1/customers/search": {"GET": (v1.CustomerSearchParams, _search_customers)},
    "/v1/customers/{id}": {"GET": (v1.CustomerRetrieveParams, _get("customer"))},
    "/v1/billing/meters": {
        "POST": (billing.MeterCreateParams, _meter),
        "GET": (billing.MeterListParams, lambda stripe, _form, _id: _list(stripe.all("billing.meter"))),
    },
    "/v1/billing/meters/{id}/event_summaries": {"GET": (billing.MeterEventSummaryListParams, _summaries)},
    "/v1/billing/meter_events": {
        "POST": (billing.MeterEventCreateParams, lambda stripe, form, _id: stripe.count(form)),
    },
    "/v1/checkout/sessions": {"POST": (checkout.SessionCreateParams, _checkout)},
    "/v1/payment_intents/{id}": {"GET": (v1.PaymentIntentRetrieveParams, _get("payment_intent"))},
    "/v1/refunds/{id}": {"GET": (v1.RefundRetrieveParams, _get("refund"))},
    "/v1/disputes/{id}": {"GET": (v1.DisputeRetrieveParams, _get("dispute"))},
    "/v1/invoices/{id}": {"GET": (v1.InvoiceRetrieveParams, _get("invoice"))},
    "/v1/subscriptions": {
        "POST": (v1.SubscriptionCreateParams, _subscription),
        "GET": (v1.SubscriptionListParams, _subscriptions),
    },
    "/v1/subscriptions/{id}": {"DELETE": (v1.SubscriptionCancelParams, _cancelled)},
    "/v1/products": {
        "POST": (v1.ProductCreateParams, lambda stripe, form, _id: stripe.add("prod", "product", name=form["name"])),
    },
    "/v1/prices": {"POST": (v1.PriceCreateParams, _price), "GET": (v1.PriceListParams, _prices)},
    "/v1/events": {"GET": (v1.EventListParams, _events)},
    "/v2/core/events/{id}": {"GET": (None, _thin)},
}
