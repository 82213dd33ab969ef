"""A stub server for each test, and a client of it that retries fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from weft import RetryPolicy, ServiceClient

from tests.client_sdk.stub_server import Stub, serve

FAST = RetryPolicy(
    first_pause_s=0.01,
    longest_pause_s=0.02,
    budget_s=1.0,
    billing_pause_s=0.02,
    billing_budget_s=0.3,
    outage_budget_s=1.0,
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEFT_BASE_URL", "WEFT_API_KEY", "TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    server = serve(stub)
    yield stub
    server.should_exit = True


@pytest.fixture
def service(stub: Stub) -> ServiceClient:
    return ServiceClient(base_url=stub.base_url, api_key="tml-test", retry=FAST)


@pytest.fixture
def patient(stub: Stub) -> ServiceClient:
    """A client that is still trying when a few faults are over, however busy this machine is."""
    policy = replace(FAST, budget_s=60.0, billing_budget_s=60.0, outage_budget_s=60.0)
    return ServiceClient(base_url=stub.base_url, api_key="tml-test", retry=policy)
