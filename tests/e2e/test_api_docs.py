"""The commands of docs/api.md, pasted in order into a shell against a real server."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import Weftd

pytestmark = pytest.mark.server
PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_commands_work_as_they_stand(weftd: Weftd, tmp_path: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    environment = {**os.environ, "WEFT_BASE_URL": weftd.url, "WEFT_API_KEY": weftd.key("curl")}
    shell = ["bash", "-eu", "-o", "pipefail", "-c", "\n".join(blocks)]
    ran = subprocess.run(shell, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    metrics, step, drawn, spent, finished = ran.stdout.strip().splitlines()
    assert "'loss:sum'" in metrics
    assert '"type":"optim_step"' in step.replace(" ", "") or "metrics" in step
    assert "'tokens': [" in drawn
    assert int(spent) > 0
    assert "error" not in finished
