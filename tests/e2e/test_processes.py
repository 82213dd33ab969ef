"""The processes of a server that is started as an operator does: what they take, and what is left of them."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import BIN, named
from tests.e2e.test_crashes import eventually

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="workers are forked on Linux alone"),
]
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


def test_workers_share_what_is_imported_and_none_outlives_the_server(tmp_path: Path) -> None:
    command = [BIN / "weftd", "serve", "--port", "0", "--data-dir", tmp_path]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("ready "), log.read_text()
            [nursery] = named(psutil.Process(server.pid), "weft-nursery")
            [trainer], [generator] = (named(nursery, f"weft-{role}") for role in ("trainer", "generator"))
            assert nursery.num_threads() == 1
            assert {nursery, trainer, generator} == set(psutil.Process(server.pid).children(recursive=True))
            [planned] = re.findall(r"^processes and libraries +(\S+) ([MG]iB)", log.read_text(), re.MULTILINE)
            ours = (psutil.Process(server.pid), nursery, trainer, generator)
            assert sum(each.memory_full_info().pss for each in ours) < float(planned[0]) * UNITS[planned[1]]

            trainer.kill()
            eventually(lambda: named(nursery, "weft-trainer") not in ([], [trainer]))
            family = psutil.Process(server.pid).children(recursive=True)
        finally:
            server.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert len(gone) == 3
    assert not alive
