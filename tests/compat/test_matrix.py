"""Every call of the official SDK works, in the version that is installed here and in others that have environments of
their own."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.compat.environments import IN_CI, build
from tests.compat.tour import tour
from tests.e2e.conftest import Weftd

pytestmark = [pytest.mark.server, pytest.mark.compat]


@pytest.mark.parametrize("version", IN_CI)
def test_every_call_of_the_version_works(version: str, weftd: Weftd, tmp_path: Path) -> None:
    python = Path(sys.executable) if version == metadata.version("tinker") else build(version)
    calls = tour(python, weftd, tmp_path)["calls"]
    failed = {call: row.get("reason") for call, row in calls.items() if row["result"] == "fail"}
    assert not failed
    assert len(calls) >= 90
