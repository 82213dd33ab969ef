"""A tenant that means harm, ten times at once: the others go on, and the server stays as large as it was.

The attacks are those of bench/attacks.py; each took seconds to minutes of everybody's time, or gigabytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.attacks import ATTACKS, Target
from tests.e2e.conftest import Weftd

pytestmark = pytest.mark.server

AT_ONCE = 10
#: What /healthz may take, at worst; tried again, for the machine may be busy with other things.
LONGEST_S, TRIES = 0.5, 3
MOST_GROWTH = 300 << 20


#: Asks for /healthz until its input ends, and prints the longest that an answer took. A process of its own: here,
#: attackers would be in its way.
PROBE = """
import http.client, select, sys, time
host, port = sys.argv[1].removeprefix("http://").split(":")
worst, connection = 0.0, http.client.HTTPConnection(host, int(port), timeout=120)
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    start = time.monotonic()
    connection.request("GET", "/healthz")
    assert connection.getresponse().read() == b'{"status":"ok"}'
    worst = max(worst, time.monotonic() - start)
print(worst)
"""


@contextmanager
def slowest_healthz(url: str) -> Iterator[list[float]]:
    """The longest that /healthz took during the block, in the list after it."""
    command = [sys.executable, "-c", PROBE, url]
    worst: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdout is not None
        assert probe.stdout.readline() == "ready\n"
        yield worst
        worst.append(float(probe.communicate()[0]))


def forget_peak(pid: int) -> int:
    """Have the kernel measure the process's peak anew; what it has now, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory(pid, "VmRSS")


def memory(pid: int, what: str) -> int:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines[what].split()[0]) << 10


@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_else_notices(weftd: Weftd, name: str) -> None:
    target = Target(weftd.url, weftd.key(f"attacker {name}"))
    for _ in range(TRIES):
        before = forget_peak(weftd.process.pid)
        with slowest_healthz(weftd.url) as worst, ThreadPoolExecutor(AT_ONCE) as pool:
            statuses = [status for found in pool.map(ATTACKS[name], [target] * AT_ONCE) for status in found]
        assert memory(weftd.process.pid, "VmHWM") - before < MOST_GROWTH
        assert [status for status in statuses if status >= 500] == []
        if worst[0] < LONGEST_S:
            return
    pytest.fail(f"/healthz took {worst[0]:.2f} s")
