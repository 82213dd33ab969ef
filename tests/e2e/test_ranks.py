"""A trainer of two ranks in a real server: whichever rank dies or hangs, clients see only a pause."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import tinker
import weft

from tests.e2e.conftest import BASE_MODEL, Weftd, named
from tests.e2e.data import ADAM, supervised
from tests.e2e.test_crashes import billed

pytestmark = pytest.mark.server
Start = Callable[..., Weftd]
TENANTS = ("acme", "globex")


def ranks_of(server: Weftd) -> list[psutil.Process]:
    """The processes of all ranks of the trainer."""
    return [rank for number in range(2) for rank in named(server.worker("trainer"), f"weft-rank-{number}")]


def train(
    server: Weftd, steps: int, found: dict[str, list[float]], before_step: Callable[[int], None], exports: Path
) -> dict[str, bytes]:
    """Train both tenants at once, so that each rank has a run. Returns the trained adapters as files, by tenant."""
    runs = {}
    for tenant in TENANTS:
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key(tenant))
        runs[tenant] = service.create_lora_training_client(BASE_MODEL, rank=4, seed=7).result()
    for step in range(steps):
        before_step(step)
        waiting: dict[str, Any] = {}
        for tenant, run in runs.items():
            data = supervised(seed=step) * (4 if tenant == TENANTS[0] else 1)
            waiting[tenant] = run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)
        for tenant, (backward, update) in waiting.items():
            found.setdefault(tenant, []).append(backward.result(timeout=120).metrics["loss:sum"])
            update.result(timeout=120)
    files = {}
    for tenant, run in runs.items():
        path = run.save_weights_for_sampler("trained").result(timeout=120).path
        with weft.RestClient(base_url=server.url, api_key=server.key(tenant)) as rest:
            rest.download_checkpoint(path, exports / tenant).result(120)
        files[tenant] = (exports / tenant / "adapter_model.safetensors").read_bytes()
    return files


#: Which rank is lost before which step, and how.
LOST = {1: (1, signal.SIGKILL), 2: (0, signal.SIGSTOP), 3: (0, signal.SIGKILL), 4: (1, signal.SIGSTOP)}
#: Before this step a rank hangs, and the server is asked to stop and started again.
LEAVES = 5
EACH = (*LOST, LEAVES)


@pytest.mark.parametrize(
    ("shard", "base_dir", "losses"),
    [
        pytest.param("all", "", (2,), id="in parts, once"),
        pytest.param("all", "", EACH, id="in parts", marks=pytest.mark.long),
        pytest.param("all", "/dev/shm", (1,), id="one mapping, once"),
        pytest.param("all", "/dev/shm", EACH, id="one mapping", marks=pytest.mark.long),
        pytest.param("experts", "", EACH, id="owners", marks=pytest.mark.long),
    ],
)
def test_whichever_rank_is_lost_losses_and_exports_are_those_of_a_calm_run(
    own_weftd: Start, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, shard: str, base_dir: str, losses: tuple[int, ...]
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    config = tmp_path / "weft.toml"
    bounds = f"threads = 1\npass_limit_s = 8.0\nshard = '{shard}'\n"
    config.write_text(f"base_dir = '{base_dir}'\ndrain_s = 3.0\n[trainer]\n{bounds}")
    server = own_weftd("--config", str(config), "--trainer-ranks", "2")
    calm: dict[str, list[float]] = {}
    steps = losses[-1] + 1
    files = train(server, steps, calm, lambda step: None, tmp_path / "calm")
    lost: list[int] = []

    def harm(step: int) -> None:
        if step not in losses:
            return
        rank, how = LOST.get(step, (1, signal.SIGSTOP))
        process = ranks_of(server)[rank]
        lost.append(process.pid)
        if step == LEAVES:
            process.send_signal(how)
            assert server.stop() == 0
            server.start()
            return
        # In the middle of the next pass: the time limit of a pass ends the rank that hangs.
        threading.Timer(0.1, process.send_signal, [how]).start()

    shaken: dict[str, list[float]] = {}
    assert train(server, steps, shaken, harm, tmp_path / "shaken") == files
    assert shaken == calm
    assert len(set(lost)) == len(losses)
    done, events = billed(server)
    assert done == events == 2 * len(TENANTS) * steps
    assert server.stop() == 0
    assert not any(psutil.pid_exists(pid) for pid in lost)
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
