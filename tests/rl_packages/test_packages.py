"""Environments of verifiers 0.1.14 and reasoning-gym, and a renderer of renderers, sampled and trained."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import Weftd
from tests.rl_packages.environment import PYTHON, ROOT, STAMP

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not STAMP.exists(), reason="python -m tests.rl_packages.environment makes what they need"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    server = Weftd(tmp_path_factory.mktemp("weftd")).start()
    yield server
    assert server.stop() == 0, server.log()


@pytest.mark.parametrize("kind", ["single", "multi", "tool", "gym", "renderer"])
def test_it_rolls_out_and_trains_on_policy(server: Weftd, kind: str) -> None:
    environment = os.environ | {
        "WEFT_BASE_URL": server.url,
        "WEFT_API_KEY": server.key(kind),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(PYTHON), str(Path(__file__).with_name("loops.py")), kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = json.loads(done.stdout.splitlines()[-1])
    assert len(steps) == 3
    trained = [step for step in steps if step["data"]]
    for step in trained:
        assert step["ratio"] == pytest.approx(1, abs=1e-6)
        assert abs(step["mismatch_kl"]) <= 1e-8
        assert step["data"] <= step["rollouts"]  # the turns of a rollout are one datum
    if kind != "gym":
        assert trained
    if kind == "multi":
        assert steps[0]["turns/rollout"] == 2
