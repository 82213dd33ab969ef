"""Signs webhooks as Stripe does. Written from its documentation, without the client's own function, so that each
checks the other."""

from __future__ import annotations

import hashlib
import hmac
import json
import time

from tests.fakestripe.contract import Form


def signed(event: Form, secret: str, *, age_s: float = 0.0) -> tuple[bytes, str]:
    """Body and `stripe-signature` of a webhook that was sent `age_s` ago."""
    body = json.dumps(event).encode()
    at = int(time.time() - age_s)
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return body, f"t={at},v1={digest}"
