"""How `make test` shares the tests among processes: a file is run by one of them, the quick files come first.

Where a fixture is dear and shared by files, they are kept together, so that it is made once.

Where the time goes: processor time, most of it. Each process first reads all tests. To import torch takes a process two
seconds, so what a test needs for what it does, and not for how it starts, is forked (`tests.forked`): servers, what
forks their workers, their trainers' ranks, workers of replicas, holders of weights. Tests that do not harm a server
share one.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Folders whose files share something that only one process should have: a vLLM.
TOGETHER = ("tests/workers/generator/vllm/",)
#: The tests that start real servers or a browser; the slowest come first, so that all processes end together.
SLOW = (
    "tests/cookbook/",
    "tests/rl_packages/",
    "tests/compat/",
    "tests/e2e/test_production.py",
    "tests/scheduler/jobs/test_celery.py",
    "tests/console/test_browser.py",
    "tests/truth/",
    "tests/workers/generator/vllm/",  # by now `.ci/run` has built it
    "tests/e2e/test_production_vllm.py",
    "tests/e2e/test_crashes.py",
    "tests/e2e/test_rl_lives.py",
    "tests/e2e/test_rl.py",
    "tests/e2e/test_ranks.py",
    "tests/e2e/test_rl_docs.py",
    "tests/e2e/",
    "tests/console/test_weftd.py",
)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out whole files, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def place(item: pytest.Item) -> int:
    """0 for a quick test; otherwise its place among the slow ones."""
    return next((place for place, slow in enumerate(SLOW, 1) if item.nodeid.startswith(slow)), 0)
