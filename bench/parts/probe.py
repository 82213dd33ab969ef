"""Watches a server while something happens to it: its slowest /healthz, and its peak of memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Asks for /healthz until its input ends, and prints the longest time of an answer. It is a process of its own, because
#: other work in this process would delay it.
_PROBE = """
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
    """The slowest /healthz during the block, in seconds, in the list once the block has ended."""
    command = [sys.executable, "-c", _PROBE, url]
    worst: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdout is not None
        assert probe.stdout.readline() == "ready\n"
        yield worst
        worst.append(float(probe.communicate()[0]))


def forget_peak(pid: int) -> int:
    """Make the kernel measure a process's peak anew; returns its present bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _memory(pid, "VmRSS")


def peak(pid: int) -> int:
    """The process's peak of memory since `forget_peak`, in bytes."""
    return _memory(pid, "VmHWM")


def _memory(pid: int, what: str) -> int:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines[what].split()[0]) << 10
