"""Temporary folders of workers that may be killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from workers.scratch import scratch

ROOT = Path(__file__).parents[2]

SCRATCH = """
from workers.scratch import scratch
with scratch("paged") as folder:
    (folder / "1.page").write_bytes(bytes(1 << 20))
    print(folder, flush=True)
    input()
"""


def test_the_next_worker_removes_the_folder_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every worker killed by a tenant's loss would leave its runs on the disk, until the disk is full."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "weft.paged-file").write_text("not ours")
    command = [sys.executable, "-c", SCRATCH]
    pipe = subprocess.PIPE
    workers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) for _ in range(2)]
    try:
        killed, other = (Path(worker.stdout.readline().strip()) for worker in workers if worker.stdout)
        workers[0].kill()
        workers[0].wait()
        assert (killed / "1.page").is_file()
        with scratch("paged") as own:
            assert own.is_dir()
            assert not killed.exists()
            assert (other / "1.page").is_file()
        workers[1].communicate("\n", timeout=60)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["weft.paged-file"]
