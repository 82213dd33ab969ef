"""A real `weftd` for the benches: a fresh data folder, a key per tenant, the official SDK as client."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from sqlalchemy.orm import Session

from api.commands.changes import change
from api.commands.places import Place
from api.server.workers.worker_programs import memory_of_workers
from store.people import keys, organisations
from store.people.roles import ADMIN

BIN = Path(sys.executable).parent
BASE_MODEL = "weft/tiny-moe"

# The SDK fetches nothing and reports nothing while it is being measured.
os.environ.update(TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1", TINKER_API_KEY="tml-unset")


@contextmanager
def serve(
    *options: str, program: Sequence[str] = (str(BIN / "weftd"),), shown: bool = False
) -> Iterator[tuple[str, Path]]:
    """Start `weftd serve`, or `program` in its place; yields its address and data folder. `shown`: its log is printed
    as it grows."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        command = [*program, "serve", "--host", "127.0.0.1", "--port", "0", "--data-dir", folder, *options]
        with (Path(folder) / "stderr.log").open("w") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        if shown:
            threading.Thread(target=_show, args=(Path(folder) / "stderr.log", server), daemon=True).start()
        try:
            assert server.stdout is not None
            line = server.stdout.readline().split()
            if len(line) != 2:
                raise RuntimeError((Path(folder) / "stderr.log").read_text())
            yield line[1], Path(folder)
        finally:
            server.terminate()
            server.wait(30)


def _show(log: Path, server: subprocess.Popen[str]) -> None:
    with log.open() as lines:
        while server.poll() is None:
            print("".join(f"  {line}" for line in lines), end="", flush=True)
            time.sleep(0.2)


def make_key(data_dir: Path, organisation: str) -> str:
    command = [str(BIN / "weftd"), "key", "create", "--data-dir", str(data_dir), "--org", organisation]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make_keys(data_dir: Path, names: Sequence[str]) -> list[str]:
    """Make a key for each organisation, in this process."""

    def write(session: Session) -> list[str]:
        found = [organisations.organisation_named(session, name).id for name in names]
        return [keys.new_key(session, org_id, scopes=(ADMIN,))[1] for org_id in found]

    return change(Place(data_dir, None), write)


def as_workers_run() -> None:
    """Restart this program with the environment of workers, which determines memory and threads when a program starts:
    so whatever it computes or starts, peers included, runs as it does for users."""
    wanted = memory_of_workers() | {"OMP_WAIT_POLICY": "PASSIVE"}
    if wanted.items() - os.environ.items():
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def trainers_of(server: int) -> list[psutil.Process]:
    """The trainers of one `weftd`, found by its process."""
    return [each for each in psutil.Process(server).children(recursive=True) if each.name() == "weft-trainer"]


def cpu_s(server: int) -> Counter[str]:
    """Processor time so far: of the trainers of a `weftd`, and of the `server` with all other processes that it has
    started."""
    spent = Counter[str]()
    for process in (psutil.Process(server), *psutil.Process(server).children(recursive=True)):
        times = process.cpu_times()
        spent["trainers" if process.name() == "weft-trainer" else "server"] += times.user + times.system
    return spent
