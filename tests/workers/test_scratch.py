"""Temporary folders of workers, of which some are killed."""

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


def test_what_a_killed_worker_has_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that a tenant's loss had killed left its runs on the disk, until there was no room on it."""
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
