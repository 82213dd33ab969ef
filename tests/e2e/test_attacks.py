"""A tenant that means harm, ten times at once: the others go on, and the server stays as large as it was.

The attacks are those of bench/parts/attacks.py; each took seconds to minutes of everybody's time, or gigabytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.parts.attacks import ATTACKS, Target
from bench.parts.probe import forget_peak, peak, slowest_healthz
from tests.e2e.conftest import Weftd

pytestmark = pytest.mark.server

AT_ONCE = 10
#: What /healthz may take, at worst; tried again, for the machine may be busy with other things.
LONGEST_S, TRIES = 0.5, 3
MOST_GROWTH = 300 << 20


@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_else_notices(weftd: Weftd, name: str) -> None:
    target, pid = Target(weftd.url, weftd.key(f"attacker {name}")), weftd.process.pid
    for _ in range(TRIES):
        before = forget_peak(pid)
        with slowest_healthz(weftd.url) as worst, ThreadPoolExecutor(AT_ONCE) as pool:
            statuses = [status for found in pool.map(ATTACKS[name], [target] * AT_ONCE) for status in found]
        assert peak(pid) - before < MOST_GROWTH
        assert [status for status in statuses if status >= 500] == []
        if worst[0] < LONGEST_S:
            return
    pytest.fail(f"/healthz took {worst[0]:.2f} s")
