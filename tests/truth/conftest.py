"""The ground that all plays of a test run stand on, and a bench on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.truth.search import Bench
from tests.truth.world import Ground


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Ground:
    return Ground(tmp_path_factory.mktemp("ground"))


@pytest.fixture
def bench(ground: Ground, tmp_path: Path) -> Bench:
    return Bench(ground, tmp_path)
