"""The parts around vLLM that need none: adapters as it reads them, turns, labels of versions, the guard."""

from __future__ import annotations

import asyncio
import inspect
import runpy
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import uvicorn
from safetensors.numpy import load_file
from weft.wire.binary.sample_codec import PolicySpan

from store.blobs.contract import StoreAway
from tests.waiting import until
from tests.workers.model.models import FAMILIES, SIZES
from workers.generator.adapters import AdapterUnusable
from workers.generator.engine import GenerateRequest, SamplingParams
from workers.generator.vllm import client, guard, translate
from workers.generator.vllm.adapters import LoraLimits, NotServable, convert, not_servable, targets
from workers.generator.vllm.policies import Pushed, spans
from workers.generator.vllm.process import not_on_cpu, quantised
from workers.generator.vllm.server import VllmServer
from workers.generator.vllm.serving import _fault
from workers.model.adapters.adapter import Adapter, load_adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.config import LatentConfig, RopeConfig, read_json
from workers.model.families.read import read_config
from workers.model.tiny import TINY_PATH

CONFIG = read_config("tiny", TINY_PATH)
LIMITS = LoraLimits(max_adapters=4, max_rank=8)
PLUGIN = Path(__file__).parents[4] / "deploy" / "vllm" / "plugin" / "weft_vllm"


def test_a_connection_is_let_go_before_vllm_closes_it() -> None:
    closes = inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default
    assert (client._LIMITS.keepalive_expiry or closes) < closes - 1


@pytest.mark.parametrize(("cpu", "newer_runner"), [(True, False), (True, True), (False, True)])
def test_the_plugin_vouches_for_the_model_runner_that_it_knows(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, newer_runner: bool
) -> None:
    """vLLM takes the newer one wherever Triton is installed, on a CPU too: logprobs would not be at the temperature."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    platform = SimpleNamespace(is_cpu=lambda: cpu)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    about = runpy.run_path(str(PLUGIN / "worker.py"))["Swap"].weft_about
    said = about(SimpleNamespace(use_v2_model_runner=newer_runner))
    assert said["tempered_logprobs"] is (cpu and not newer_runner)


def saved(folder: Path, *, rank: int = 4, unembed: bool = False, fill: float | None = None) -> Path:
    adapter = Adapter.init(AdapterShape(CONFIG, rank, True, True, unembed), seed=0, scale=0.37)
    adapter.flat.add_(0.01)
    if fill is not None:
        adapter.flat.fill_(fill)
    save_adapter(adapter, folder, base_model="tiny", details={"step": 7})
    return folder


def test_an_adapter_is_written_as_peft_with_its_scale_in_the_weights(tmp_path: Path) -> None:
    version = convert("a", saved(tmp_path / "a"), tmp_path / "out", CONFIG, LIMITS)
    assert version == 7
    config = read_json(tmp_path / "out" / "adapter_config.json")
    assert config["lora_alpha"] == config["r"] == 4
    keys = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all("mlp.experts." not in key or key.split("mlp.experts.")[1][0].isdigit() for key in keys)
    assert not any("lm_head" in key for key in keys)
    before, after = (load_adapter(tmp_path / name, CONFIG).adapter for name in ("a", "out"))
    for name, view in before.views.items():
        scaled = view * 0.37 if name.endswith("_B") else view
        np.testing.assert_allclose(after.view(name).numpy(), scaled.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "word"), [({"unembed": True}, "train_unembed"), ({"rank": 9}, "rank is 9"), ({"fill": np.inf}, "finite")]
)
def test_adapters_that_vllm_would_serve_wrong_are_refused(tmp_path: Path, kind: dict[str, float], word: str) -> None:
    with pytest.raises(NotServable, match=word):
        convert("a", saved(tmp_path / "a", **kind), tmp_path / "out", CONFIG, LIMITS)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_adapters_of_a_family_whose_names_vllm_may_not_know_are_refused(tmp_path: Path) -> None:
    other = replace(CONFIG, architecture="Qwen3NextForCausalLM")
    with pytest.raises(NotServable, match="of a Qwen3NextForCausalLM; it was tried with adapters of "):
        convert("a", saved(tmp_path / "a"), tmp_path / "out", other, LIMITS)


def test_adapters_of_a_model_that_sees_are_refused(tmp_path: Path) -> None:
    """Its text model is a family that is served, but in vLLM it is within another class, which has other names."""
    sees = replace(LIMITS, architecture="KimiK25ForConditionalGeneration")
    with pytest.raises(NotServable, match="of a KimiK25ForConditionalGeneration"):
        convert("a", saved(tmp_path / "a"), tmp_path / "out", CONFIG, sees)


LATENT = LatentConfig(q_rank=8, kv_rank=8, plain_dim=8, rope_dim=8, value_dim=8, scale=1.0)
YARN = RopeConfig(kind="yarn", factor=4.0)


@pytest.mark.parametrize(
    ("latent", "rope", "said"),
    [
        (LATENT, YARN, None),
        (replace(LATENT, interleaved=False), YARN, "rope_interleave is false"),
        (LATENT, RopeConfig(), "YaRN alone"),
    ],
)
def test_latent_attention_that_turns_otherwise_than_vllms_is_refused(
    latent: LatentConfig, rope: RopeConfig, said: str | None
) -> None:
    config = replace(CONFIG, architecture="DeepseekV3ForCausalLM", latent=latent, rope=rope)
    adapter = Adapter.init(AdapterShape(config, 2, True, True, False), seed=0)
    for reason in (not_servable(adapter, LIMITS), not_on_cpu(config, torch.float32)):
        assert (reason is None) if said is None else said in str(reason)


@pytest.mark.parametrize(
    ("tiny", "dtype", "said"),
    [
        ("qwen3.5", torch.float32, "bfloat16 alone"),
        ("qwen3.5", torch.bfloat16, None),
        ("nemotron-h", torch.float32, "without a gate"),
        ("bailing", torch.float32, "the code of the checkpoint"),
        ("deepseek", torch.float32, None),
    ],
)
def test_models_that_vllm_cannot_compute_on_a_cpu_are_refused_before_it_starts(
    tiny: str, dtype: torch.dtype, said: str | None, tmp_path: Path
) -> None:
    _, config_class, extra = FAMILIES[tiny]
    config_class(**{**SIZES, **extra}, architectures=[FAMILIES[tiny][0].__name__]).save_pretrained(tmp_path)
    reason = not_on_cpu(read_config("m", tmp_path), dtype)
    assert (reason is None) if said is None else said in str(reason)


def test_what_a_checkpoint_rounds_is_said() -> None:
    assert quantised({"quantization_config": {"quant_method": "fp8"}}) == "the checkpoint's fp8 weights"
    assert quantised({"quantization_config": None}) == quantised({}) == ""


def test_experts_are_named_as_in_the_familys_checkpoints(tmp_path: Path) -> None:
    convert("a", saved(tmp_path / "a"), tmp_path / "out", replace(CONFIG, architecture="MixtralForCausalLM"), LIMITS)
    keys = load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
    at = "base_model.model.model.layers.0.block_sparse_moe.experts.3"
    assert {f"{at}.{name}.lora_A.weight" for name in ("w1", "w2", "w3")} <= keys
    assert not any(".mlp." in key for key in keys)


def test_adapters_that_nobody_can_serve_are_refused_otherwise(tmp_path: Path) -> None:
    for source in (None, tmp_path / "nowhere", tmp_path):
        with pytest.raises(AdapterUnusable) as caught:
            convert("a", source, tmp_path / "out", CONFIG, LIMITS)
        assert not isinstance(caught.value, NotServable)


def test_targets_never_hold_the_unembedding() -> None:
    assert targets(CONFIG) == ["qkv_proj", "o_proj", "experts"]


def test_a_request_whose_weights_cannot_be_read_for_now_is_made_later() -> None:
    error = _fault("r", StoreAway("the server's object store does not answer (Unreachable)")).error
    assert error is not None
    assert (error.category, error.elsewhere) == ("server", "later")


def test_labels_become_versions() -> None:
    pushed = Pushed("a@3", Path("a"), Path("w"), [(2, 3)])
    pushed.versions += [(5, 4), (6, 6)]
    labels = [{"version": v, "start": s, "end": e} for v, s, e in [("2", 0, 4), ("4", 4, 6), ("5", 6, 9), ("6", 9, 12)]]
    assert spans(pushed, labels, 12) == (PolicySpan(3, 6), PolicySpan(4, 3), PolicySpan(6, 3))
    assert spans(pushed, labels, 7) == (PolicySpan(3, 6), PolicySpan(4, 1))
    assert spans(None, labels, 12) == (PolicySpan(0, 12),)
    assert spans(pushed, None, 0) == ()


def test_every_sequence_has_a_seed_of_its_own() -> None:
    seeds = {translate.sequence_seed(seed, sample) for seed in range(50) for sample in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_one_more_top_logprob_is_asked_because_the_sampled_token_counts() -> None:
    request = GenerateRequest("r", (1, 2), SamplingParams(temperature=0), topk_sample_logprobs=2)
    assert translate.params_of(request, 0, 5, [9])["logprobs"] == 3
    entry = {"token_id": 8, "logprob": -5.0}
    top = [entry, {"token_id": 1, "logprob": -0.1}, {"token_id": 2, "logprob": -1.0}]
    choice = {"token_ids": [8], "logprobs": {"content": [{**entry, "top_logprobs": top}]}}
    topk = translate.sequence_of(request, choice, 10).topk
    assert topk is not None
    assert topk.token_ids.tolist() == [[1, 2]]


def test_the_guard_ends_all_when_its_parent_is_gone() -> None:
    family = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    command = [sys.executable, guard.__file__, sys.executable, "-c", f"{family} time.sleep(600)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(found := psutil.Process(process.pid).children(recursive=True)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(60)
    _, alive = psutil.wait_procs(found, timeout=60)
    assert not alive


SHARES = """
import multiprocessing, os, sys, time
from multiprocessing.shared_memory import SharedMemory

def share():
    print(SharedMemory(create=True, size=1 << 20).name, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=share).start()
    print(SharedMemory(create=True, size=1 << 20).name, flush=True)
    while os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    os._exit(1)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="where shared memory is no files")
@pytest.mark.parametrize("first", ["the parent", "the command"])
def test_what_a_guard_ends_leaves_no_shared_memory(tmp_path: Path, first: str) -> None:
    """vLLM's processes have queues of up to 250 MB there, which the kernel does not take back."""
    program, flag = tmp_path / "shares.py", tmp_path / "flag"
    program.write_text(SHARES)
    flag.touch()
    command = [sys.executable, guard.__file__, sys.executable, str(program), str(flag)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        shared = [Path("/dev/shm", process.stdout.readline().strip()) for _ in range(2)]
        assert all(file.is_file() for file in shared)
        if first == "the parent":
            process.communicate(timeout=60)  # closes its end of the guard's pipe
        else:
            flag.unlink()
            process.wait(60)
    until(lambda: not any(file.exists() for file in shared))


def test_what_a_guard_began_ends_with_it() -> None:
    command = [sys.executable, guard.__file__, sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    found = until(lambda: psutil.Process(process.pid).children())
    process.kill()
    process.wait(60)
    _, alive = psutil.wait_procs(found, timeout=60)
    assert not alive


class Stranger:
    """A vLLM that somebody else has started, as its client sees it."""

    def __init__(self, connector: str | None) -> None:
        self.transfer = connector and {"kv_connector": connector, "kv_role": "kv_consumer"}

    async def healthy(self) -> bool:
        return True

    async def about(self) -> dict[str, object]:
        return {}

    async def models(self) -> dict[str, int]:
        return {"m": 64}

    async def options(self) -> dict[str, object]:
        return {"kv_transfer_config": self.transfer} if self.transfer else {}

    async def generate(self, body: dict[str, object]) -> dict[str, object]:
        return {}

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "connector", ["ExampleConnector", "LMCacheConnectorV1", "MultiConnector", "NixlConnector", None]
)
def test_a_server_whose_connector_mixes_organisations_is_not_used(tmp_path: Path, connector: str | None) -> None:
    """One half of a pair that prefills and decodes apart is used as a whole one."""

    async def came_up() -> VllmServer:
        server = VllmServer(tmp_path, url="http://10.0.0.7:8000")
        await server.client.close()
        server.client = Stranger(connector)  # type: ignore[assignment]
        waits: list[asyncio.Task[object]] = [
            asyncio.create_task(server.keep()),
            asyncio.create_task(server.ready.wait()),
        ]
        await asyncio.wait(waits, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await server.close()
        return server

    server = asyncio.run(came_up())
    if connector in ("NixlConnector", None):
        assert server.lives == 1
        assert server.failure is None
    else:
        assert server.lives == 0
        assert f"http://10.0.0.7:8000 has kv_transfer_config with kv_connector {connector}" in str(server.failure)
