"""A Stripe of our own for tests: stateful, with a clock that tests move and faults that they choose, reached over HTTP
by the official client. What it takes and gives is checked against stripe-python's generated types, so that it cannot
drift from the API by itself. What it cannot prove is that Stripe behaves as it documents (docs/payments.md).
"""

from tests.fakestripe.server import FakeStripe, fake_stripe
from tests.fakestripe.state import Stripe

__all__ = ["FakeStripe", "Stripe", "fake_stripe"]
