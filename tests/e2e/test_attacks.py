"""A malicious tenant attacks ten times at once: others are served, and the server does not grow.

The attacks are those of bench/parts/attacks.py; each once cost everybody seconds to minutes, or gigabytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from bench.parts.attacks import ATTACKS, Attack, Target, packed
from bench.parts.probe import forget_peak, peak, slowest_healthz
from tests.e2e.conftest import Weftd

pytestmark = pytest.mark.server

AT_ONCE = 10
#: The longest that /healthz may take; tried again, because the machine may be busy with other things.
LONGEST_S, TRIES = 0.5, 3
MOST_GROWTH = 300 << 20


@dataclass(frozen=True)
class Rehearsal(Target):
    """A client that packs what is to be sent and keeps it, without sending anything."""

    kept: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)

    def post_packed(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        self.kept.append((path, packed(body), {**headers, "content-encoding": "zstd"}))
        return 0


def attack_of(name: str) -> Attack:
    """An attack; one of 60 MB or more unpacked is made once, for making it delays our own requests to /healthz."""
    if name not in ("packed_json", "packed_telemetry", "packed_empty_data", "webhook"):
        return ATTACKS[name]
    rehearsal = Rehearsal("", "")
    ATTACKS[name](rehearsal)
    assert rehearsal.kept
    return lambda target: [target.post(*kept) for kept in rehearsal.kept]


@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_else_notices(weftd: Weftd, name: str) -> None:
    target, pid, attack = Target(weftd.url, weftd.key(f"attacker {name}")), weftd.process.pid, attack_of(name)
    for _ in range(TRIES):
        before = forget_peak(pid)
        with slowest_healthz(weftd.url) as worst, ThreadPoolExecutor(AT_ONCE) as pool:
            statuses = [status for found in pool.map(attack, [target] * AT_ONCE) for status in found]
        assert peak(pid) - before < MOST_GROWTH
        assert [status for status in statuses if status >= 500] == []
        if worst[0] < LONGEST_S:
            return
    pytest.fail(f"/healthz took {worst[0]:.2f} s")
