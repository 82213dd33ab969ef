"""The ground for all plays of a test run, and a bench on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.truth.search import Bench
from tests.truth.world import Ground


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("ground"))


@pytest.fixture
def bench(ground: Ground, tmp_path: Path) -> Bench:
    return Bench(ground, tmp_path)
