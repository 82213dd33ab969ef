from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from store.database.db import Database
from tests.billing.payments.kit import START, Payments
from tests.fakestripe import FakeStripe, fake_stripe


@pytest.fixture(scope="session")
def stripe_server() -> Iterator[FakeStripe]:
    with fake_stripe() as server:
        yield server


@pytest.fixture
def payments(any_database: Database, stripe_server: FakeStripe, tmp_path: Path) -> Payments:
    return Payments(any_database, stripe_server.reset(START), tmp_path)
