"""The memory that a worker keeps after a pass, and gives back to the system when it has nothing to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.server.workers.worker_programs import memory_of_workers
from scheduler.links.messages import Drain, Pass
from store.blobs.folder import FolderBlobs
from workers import rest
from workers.generator.worker import Generator
from workers.model.decoder import Decoder
from workers.rest import REST_S, Rest
from workers.trainer.process import StopFlag, serve

#: A program that takes 96 MiB in blocks that lie below the last one, frees them, and prints what the system got back.
PASS = """
from pathlib import Path
from workers.rest import give_back

def resident_kib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

blocks = [bytearray(3 << 20) for _ in range(32)]
last, blocks = bytearray(1 << 20), None
before = resident_kib()
give_back()
print(before - resident_kib())
"""


@pytest.mark.skipif(not memory_of_workers(), reason="no glibc")
def test_memory_of_a_pass_goes_back_to_the_system() -> None:
    environment = {**os.environ, **memory_of_workers()}
    code = subprocess.run([sys.executable, "-c", PASS], env=environment, capture_output=True, text=True, check=True)
    assert int(code.stdout) > 64 << 10


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that memory was given back."""
    found: list[None] = []
    monkeypatch.setattr(rest, "give_back", lambda: found.append(None))
    return found


def test_memory_is_given_back_once_and_not_between_the_steps_of_a_loop(given: list[None]) -> None:
    now = [0.0]
    resting = Rest(lambda: now[0])

    def wait_until(time: float) -> None:
        now[0] = time
        resting.waited()

    wait_until(REST_S - 0.5)
    resting.worked()
    wait_until(2 * REST_S - 1)
    assert not given
    wait_until(2 * REST_S)
    wait_until(9 * REST_S)
    assert len(given) == 1
    resting.worked()
    wait_until(20 * REST_S)
    assert len(given) == 2


@dataclass
class Scripted:
    """A link that has the next message or none, and a trainer that does nothing with it."""

    script: list[Any]
    models: Mapping[str, Decoder] = field(default_factory=dict)
    residency: Any = None
    memory_bytes: int = 0

    def send(self, *messages: msgspec.Struct) -> None: ...

    def recv(self, timeout_s: float | None = None) -> Any:
        return None if timeout_s == 0 else self.script.pop(0)

    def execute(self, pass_: Pass, send: Any) -> None: ...

    def drain(self, send: Any) -> None: ...


def test_trainers_and_generators_that_wait_give_memory_back(
    given: list[None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rest, "REST_S", 0.0)
    trainer = Scripted([None, None, Pass(1, "m", []), None, None, Drain()])
    serve(trainer, trainer, StopFlag())
    assert len(given) == 2, "once before the pass, once after it"
    Generator({}, FolderBlobs(tmp_path), Scripted([None, None, Drain()]), slots=1).serve()
    assert len(given) == 3
