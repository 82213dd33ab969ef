"""Checks requests and objects against the types that stripe-python generates from Stripe's OpenAPI document."""

from __future__ import annotations

import types
import typing
from functools import lru_cache
from typing import Any, NotRequired
from urllib.parse import parse_qsl

import stripe
from stripe._request_options import RequestOptions
from typing_extensions import get_type_hints, is_typeddict

Form = dict[str, Any]


class BadRequest(Exception):
    """A request that Stripe answers with 400."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.body = {
            "error": {"type": kind or "invalid_request_error", "message": message, "code": code, "param": param}
        }


def parse_form(text: str) -> Form:
    """`a[b][0][c]=d` as Stripe reads it: nested dictionaries, with lists where the keys are numbers."""
    root: Form = {}
    for name, value in parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text)):
        *path, last = name.replace("]", "").split("[")
        here = root
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value
    return {name: _with_lists(value) for name, value in root.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(key.isdecimal() for key in value):
        return [_with_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _with_lists(child) for key, child in value.items()}


def check_params(params: Form, declared: type | None) -> None:
    """Refuse what Stripe would: parameters that the type does not have, and missing ones that it requires."""
    if declared is None:
        if params:
            raise _unknown(next(iter(params)))
        return
    _check_fields(params, declared, "")


@lru_cache(maxsize=512)
def _fields(declared: type) -> dict[str, Any]:
    # The options of the request itself (api_key, ...) are declared alongside; they never reach Stripe as parameters.
    own = {name: hint for name, hint in declared.__annotations__.items() if name not in RequestOptions.__annotations__}
    return get_type_hints(
        type("Own", (), {"__annotations__": own, "__module__": declared.__module__}), include_extras=True
    )


def _check_fields(params: Form, declared: type, at: str) -> None:
    fields = _fields(declared)
    for name, value in params.items():
        path = f"{at}[{name}]" if at else name
        if name not in fields:
            raise _unknown(path)
        _check(value, fields[name], path)
    for name, hint in fields.items():
        if typing.get_origin(hint) is not NotRequired and name not in params:
            path = f"{at}[{name}]" if at else name
            raise BadRequest(f"Missing required param: {path}.", code="parameter_missing", param=path)


def _check(value: Any, hint: Any, path: str) -> None:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is NotRequired:
        _check(value, inner[0], path)
    elif origin in (typing.Union, types.UnionType):
        _check(value, _choose(value, inner), path)
    elif origin is list and isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, inner[0], f"{path}[{index}]")
    elif is_typeddict(hint):
        if not isinstance(value, dict):
            raise BadRequest(f"Invalid object: {path}", param=path)
        _check_fields(value, hint, path)
    elif origin is dict:
        if not isinstance(value, dict):
            raise BadRequest(f"Invalid hash: {path}", param=path)
    elif isinstance(value, (dict, list)):
        raise BadRequest(f"Invalid string: {path}", param=path)
    elif hint is int and not str(value).lstrip("-").isdecimal():
        raise BadRequest(f"Invalid integer: {value}", param=path)
    elif origin is typing.Literal and value not in inner:
        raise BadRequest(f"Invalid {path}: must be one of {', '.join(inner)}", param=path)


def _choose(value: Any, hints: tuple[Any, ...]) -> Any:
    """The alternative of a union that fits a value."""
    for hint in hints:
        origin = typing.get_origin(hint)
        if isinstance(value, dict) and (is_typeddict(hint) or origin is dict):
            return hint
        if isinstance(value, list) and origin is list:
            return hint
        if not isinstance(value, (dict, list)) and hint in (str, int, float):
            return hint
    return hints[0]


def _unknown(path: str) -> BadRequest:
    return BadRequest(f"Received unknown parameter: {path}", code="parameter_unknown", param=path)


#: The model of each kind of object that the fake gives out.
MODELS: dict[str, Any] = {
    "customer": stripe.Customer,
    "billing.meter": stripe.billing.Meter,
    "billing.meter_event": stripe.billing.MeterEvent,
    "billing.meter_event_summary": stripe.billing.MeterEventSummary,
    "checkout.session": stripe.checkout.Session,
    "payment_intent": stripe.PaymentIntent,
    "refund": stripe.Refund,
    "dispute": stripe.Dispute,
    "invoice": stripe.Invoice,
    "subscription": stripe.Subscription,
    "product": stripe.Product,
    "price": stripe.Price,
    "event": stripe.Event,
}


def check_object(thing: Form) -> Form:
    """Refuse an object with a field that Stripe's lacks: code that reads it would pass here and fail there."""
    model = MODELS[thing["object"]]
    invented = set(thing) - set(model.__annotations__)
    if invented:
        raise AssertionError(f"{thing['object']} has no {', '.join(sorted(invented))}")
    return thing
