"""What many tests of the scheduler need: a data folder, and a Redis that they may empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.scheduler.journal.kit import Service, organisation
from tests.servers import redis_server


@pytest.fixture(scope="module")
def own_redis() -> Iterator[str]:
    with redis_server() as own:
        yield own


@pytest.fixture
def url(own_redis: str) -> str:
    """It is empty."""
    redis.Redis.from_url(own_redis).flushall()
    return own_redis


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with an organisation, which has a session and a sampler."""
    service = Service(tmp_path)
    organisation(service)
    service.database.close()
    return tmp_path
