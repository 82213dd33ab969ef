"""A fake Stripe for tests: stateful, with a clock that tests move and faults that they choose, reached over HTTP by the
official client. Its requests and answers are checked against stripe-python's generated types, so that it cannot drift
from the API. It cannot prove that Stripe behaves as documented (docs/payments.md).
"""

from tests.fakestripe.server import FakeStripe, fake_stripe
from tests.fakestripe.state import Stripe

__all__ = ["FakeStripe", "Stripe", "fake_stripe"]
