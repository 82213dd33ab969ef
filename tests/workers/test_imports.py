"""A worker imports nothing of the server: no database, no billing, no journal, no HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

IMPORTS = """
import json, os, sys
import torch
asked = []
def noted(name):
    def note(*args):
        asked.append(name)
        return 0
    return note
for place, names in {torch.cuda: ("is_available", "device_count", "_lazy_init"),
                     torch._C: ("_cuda_getDeviceCount", "_cuda_init"),
                     torch.accelerator: ("is_available", "device_count", "current_accelerator")}.items():
    for name in names:
        if hasattr(place, name):
            setattr(place, name, noted(name))
import workers.__main__, workers.trainer.process, workers.generator.process
threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
state = [asked, torch.cuda.is_initialized(), threads]
import scheduler.links.sample_link, scheduler.links.train_link
print(json.dumps([state, sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def imported() -> tuple[list[object], list[str]]:
    """What tells whether a process can be forked after these imports, without the links to Redis; and the names of all
    modules imported, with the links."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IMPORTS]
    out = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    state, names = json.loads(out)
    return state, names


def test_what_workers_import_of_ours_and_of_the_servers_libraries(imported: tuple[list[object], list[str]]) -> None:
    """For trainers and generators with their links to Redis: more than any worker imports before it has its config."""
    names = imported[1]
    rooms = {name for name in names if name.partition(".")[0] in ("api", "billing", "scheduler", "store", "weft")}
    of_store = ("store.blobs", "store.cgroups", "store.logs", "store.tracing")
    allowed = ("scheduler.links", *of_store, "weft.wire")
    assert {n for n in rooms if not n.startswith(allowed)} == {"scheduler", "store", "weft"}
    assert not rooms & {"store.blobs.bucket", "store.blobs.objects", "store.blobs.owner"}  # if blobs lie in a folder
    libraries = {name.partition(".")[0] for name in names}
    assert not libraries & {"sqlalchemy", "alembic", "psycopg", "fastapi", "starlette", "uvicorn", "celery", "stripe"}


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_what_workers_import_can_be_forked(imported: tuple[list[object], list[str]]) -> None:
    """The imports have asked for no device, since CUDA does not survive a fork, and started no thread."""
    assert imported[0] == [[], False, 1]
