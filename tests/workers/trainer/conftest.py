"""One tiny random mixture-of-experts model, and benches for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.model.models import ours, reference
from tests.workers.trainer.kit import Bench
from workers.model.decoder import Decoder


@pytest.fixture(scope="session")
def model() -> Any:
    """transformers' own class with random weights; never changed."""
    return reference("moe")


@pytest.fixture(scope="session")
def decoder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return ours(model, tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_bench(decoder: Decoder, tmp_path: Path) -> Callable[..., Bench]:
    """Makes benches with separate blobs, to compare with each other."""
    count = iter(range(100))
    return lambda **settings: Bench(decoder, tmp_path / f"world{next(count)}", **settings)


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()
