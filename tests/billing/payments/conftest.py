from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from api.server.app import front
from api.state.service import Service
from billing.prices import load_prices
from scheduler.journal.journal import Journal
from store.database.db import Database
from store.settings import Settings
from store.tables import Organisation
from tests.billing.payments.door import Door
from tests.billing.payments.kit import START, Payments
from tests.fakestripe import FakeStripe, fake_stripe
from tests.keys import create_key


@pytest.fixture(scope="session")
def stripe_server() -> Iterator[FakeStripe]:
    with fake_stripe() as server:
        yield server


@pytest.fixture
def payments(any_database: Database, stripe_server: FakeStripe, tmp_path: Path) -> Payments:
    return Payments(any_database, stripe_server.reset(START), tmp_path)


@pytest.fixture
def door(payments: Payments) -> Iterator[Door]:
    # The API keeps events by the machine's clock, and by the fake one they have to be due.
    payments.fake.stripe.now = datetime(2046, 11, 29, 12, tzinfo=UTC).timestamp()
    context = payments.context
    settings = Settings(data_dir=payments.folder, payments=payments.fake.settings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        journal = Journal(context.database, context.blobs, load_prices(), 100)
        app.state.service = Service(settings, {}, context.database, context.blobs, load_prices(), journal, dict)
        yield

    key = payments.database.write_now(lambda session: create_key(session, "acme"))
    with payments.database.read() as session:
        org_id = session.query(Organisation).filter_by(name="acme").one().id
    with TestClient(front(lifespan)) as http:
        yield Door(payments, http, key, org_id)
