"""vLLM's options: which may be set, how they reach the command that is started, and whether a model fits the GPUs."""

from __future__ import annotations

import json
import math
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from api.cli import weftd
from api.server.workers.memory_plan import planned
from api.server.workers.worker_programs import embedded_workers, lone_worker
from scheduler.links.configs import GeneratorConfig, VllmConfig
from store.load_settings import load_settings
from store.settings import Settings, SettingsError
from tests.workers.model.planning.test_check import NEMOTRON, NEMOTRONS, OF_TINKER, PUBLISHED, SAME
from tests.workers.model.planning.test_plan import GIB, SHAPES
from workers.generator.vllm.adapters import LoraLimits, targets
from workers.generator.vllm.server import Launch
from workers.model.card import ModelCard, config_card
from workers.model.planning.check import check_model
from workers.model.planning.plan import Device, DoesNotFit
from workers.model.planning.vllm_options import OPTIONS, BadOption, Layout, checked, other_numbers, words
from workers.model.planning.vllm_plan import kv_bytes, plan_vllm


def card(folder: Path, name: str, **changed: Any) -> ModelCard:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(SHAPES[name] | changed))
    return config_card(name, folder / name)


QWEN3_NEXT = PUBLISHED["Qwen3NextForCausalLM"][1] | {"architectures": ["Qwen3NextForCausalLM"]}
OFFLOADED: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it may be a number of GPUs"),
        ({"tensor_parallel_size": True}, "may be a number of GPUs"),
        ({"tensor-parallel-size": "2"}, 'is "2"'),
        ({"enable_lora": False}, "enable_lora is not known here; known are tensor_parallel_size"),
        ({"quantization": "awq"}, "it may be fp8_per_tensor or fp8_per_block"),
        ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}}, "it may be a table with method"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens"),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}},
            "start such yourself",
        ),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "OffloadingConnector"),
        ({"kv_transfer_config": OFFLOADED | {"kv_connector_module_path": "os"}}, "OffloadingConnector"),
        ({"kv_transfer_config": OFFLOADED | {"kv_connector_extra_config": {}}}, "cpu_bytes_to_use"),
        *(
            ({"kv_transfer_config": OFFLOADED | {"kv_connector_extra_config": {"cpu_bytes_to_use": 1} | more}}, "like")
            for more in (
                {"spec_module_path": "os", "spec_name": "a"},
                {"cache_policy_module_path": "os"},
                {"secondary_tiers": [{"type": "p2p"}]},
            )
        ),
        ({"enable_expert_parallel": True}, "there is one GPU"),
        ({"gpu_memory_utilization": 1.5}, "less than 1"),
        ({"kv_cache_dtype": date(2026, 1, 1)}, 'is "2026-01-01"; it may be auto or fp8'),  # TOML has dates
        ({"kv_offloading_size": math.inf}, "is Infinity; it may be GiB of the host's memory"),
    ],
)
def test_options_that_vllm_may_not_have_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=re.escape(said)):
        checked(options)
    program = tmp_path / "vllm"
    program.touch()
    vllm = {"program": program, "options": options}
    settings = load_settings(None, data_dir=tmp_path, generator={"engine": "vllm", "vllm": vllm})
    with pytest.raises(SettingsError, match=r"generator\.vllm\.options"):
        embedded_workers(settings, {"m": tmp_path})


def test_options_reach_the_command_and_each_vllm_has_gpus_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "vllm"
    program.touch()
    config = tmp_path / "weft.toml"
    config.write_text(
        f"""
        [generator]
        replicas = ["vllm", "torch", "vllm", "vllm"]
        device = "cuda:1"
        [generator.vllm]
        program = "{program}"
        urls = ["http://10.0.0.7:8000"]
        lossy_adapters = true
        options.tensor-parallel-size = 2
        options.enable_expert_parallel = true
        options.kv_cache_dtype = "fp8"
        options.speculative_config = {{ method = "ngram", num_speculative_tokens = 4 }}
        """
    )
    settings = load_settings(config, data_dir=tmp_path)
    models = {"m": tmp_path, "n": tmp_path}
    with pytest.raises(SettingsError, match="one base model"):
        embedded_workers(settings, models)
    programs = embedded_workers(settings, {"m": tmp_path})[1:]
    engines = [p.config.engine for p in programs if isinstance(p.config, GeneratorConfig)]
    at_url, _, first, second = engines
    assert isinstance(at_url, VllmConfig)
    assert isinstance(first, VllmConfig)
    assert isinstance(second, VllmConfig)
    assert (at_url.options, at_url.gpus) == ({}, {})
    assert (first.gpus, second.gpus) == ({"m": [1, 2]}, {"m": [3, 4]})
    assert first.lossy_adapters
    several = settings.model_copy(update={"generator": _without_urls(settings)})
    alone = lone_worker(several, models, "generator").config
    assert isinstance(alone, GeneratorConfig)
    assert isinstance(alone.engine, VllmConfig)
    assert alone.engine.gpus == {"m": [1, 2], "n": [3, 4]}
    shape = card(tmp_path, "30B-A3B").config
    limits = LoraLimits()
    launch = Launch(
        program, tmp_path, targets(shape), 8, 4, limits, cpu=False, options=first.options, gpus=first.gpus["m"]
    )
    command = launch.command(tmp_path / "socket")
    said = " ".join(command)
    assert "--tensor-parallel-size 2 --enable-expert-parallel --kv-cache-dtype fp8" in said
    assert json.loads(command[command.index("--speculative-config") + 1]) == first.options["speculative_config"]
    assert launch.environment(tmp_path)["CUDA_VISIBLE_DEVICES"] == "1,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert launch.environment(tmp_path)["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-c"


def _without_urls(settings: Settings) -> Any:
    vllm = settings.generator.vllm.model_copy(update={"urls": []})
    return settings.generator.model_copy(update={"vllm": vllm})


def test_every_option_says_what_it_does_to_the_numbers() -> None:
    assert (
        other_numbers({"quantization": "fp8_per_tensor", "kv_cache_dtype": "fp8"})
        == "quantization = fp8_per_tensor and kv_cache_dtype = fp8"
    )
    assert other_numbers({"kv_cache_dtype": "auto", "tensor_parallel_size": 8}) == ""
    assert {name for name, option in OPTIONS.items() if option.numbers == "others"} == {
        "quantization",
        "kv_cache_dtype",
    }
    assert checked({"kv_transfer_config": OFFLOADED}) == {"kv_transfer_config": OFFLOADED}
    assert not OPTIONS["kv_transfer_config"].cpu
    assert words({"enable_expert_parallel": False, "kv_offloading_size": 2.5}) == ["--kv-offloading-size", "2.5"]


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ("30B-A3B", {"tensor_parallel_size": 3}, "is no multiple|does not divide the model's 32 attention heads"),
        ("4B", {"tensor_parallel_size": 3}, "does not divide the model's 32 attention heads"),
        ("4B", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "the model has no experts"),
        ("30B-A3B", {"data_parallel_size": 6, "enable_expert_parallel": True}, "6 GPUs do not divide .* 128 experts"),
        ("30B-A3B", {"data_parallel_size": 5}, "5 GPUs do not divide the model's 768 columns of an expert"),
        ("30B-A3B", {"tensor_parallel_size": 6}, "6 is no multiple of the model's 4 heads"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    tmp_path: Path, shape: str, options: dict[str, Any], said: str
) -> None:
    found = check_model(card(tmp_path, shape))
    with pytest.raises(DoesNotFit, match=said):
        plan_vllm(found, Device("gpu", 999 * GIB), options, adapters=1, rank=8, context=1024, slots=8)


def test_a_plan_by_hand(tmp_path: Path) -> None:
    """Qwen3-235B on 8 GPUs of 141 GiB: each has an eighth of the published parameters. It has 4 heads of keys and
    values, so two GPUs each have the same one whole."""
    model = check_model(card(tmp_path, "235B-A22B"))
    gpu, eight = Device("gpu", 141 * GIB), {"tensor_parallel_size": 8}
    asked = {"adapters": 2, "rank": 8, "context": 8192, "slots": 64}
    sliced = {part.name: part.size_bytes for part in plan_vllm(model, gpu, eight, **asked)}  # type: ignore[arg-type]
    assert sliced["weights of vLLM"] == pytest.approx(2 * 235.09e9 / 8, rel=1e-3)
    assert kv_bytes(model, Layout(8), {}) == 94 * 2 * 128 * 2
    assert kv_bytes(model, Layout(8), {"kv_cache_dtype": "fp8"}) == 94 * 2 * 128
    assert kv_bytes(model, Layout(2), {}) == 94 * 2 * 2 * 128 * 2
    experts = 94 * 128 * (3 * 4096 + 3 * 1536 // 8)
    attention = 94 * (3 * 4096 + 8192 // 8 + 2 * 128 + 8192 // 8 + 4096)
    assert sliced["room for adapters"] == 2 * 2 * 8 * (experts + attention)
    whole = plan_vllm(model, gpu, eight | {"enable_expert_parallel": True}, **asked)  # type: ignore[arg-type]
    by_name = {part.name: part.size_bytes for part in whole}
    assert by_name["room for adapters"] == 2 * 2 * 8 * (94 * 16 * (3 * 4096 + 3 * 1536) + attention)
    halved = plan_vllm(model, gpu, eight | {"quantization": "fp8_per_tensor"}, **asked)[0].size_bytes  # type: ignore[arg-type]
    assert halved == pytest.approx(235.09e9 / 8, rel=0.01)
    assert sum(by_name.values()) <= 0.9 * 141 * GIB
    with pytest.raises(DoesNotFit, match=r"room for adapters; 0.9 of gpu .* max_adapters or max_rank"):
        plan_vllm(model, gpu, eight, adapters=16, rank=64, context=8192, slots=64)
    with pytest.raises(DoesNotFit, match=r"weights of vLLM; .* tensor_parallel_size"):
        plan_vllm(model, gpu, {}, adapters=2, rank=8, context=8192, slots=64)


@pytest.mark.parametrize(
    ("fields", "experts", "recurrent"),
    [
        (NEMOTRON | NEMOTRONS["Nano"][2], 23 * 128 * 2 * 2688 * 1856, 23),
        (NEMOTRON | NEMOTRONS["Super"][2], 40 * 512 * 2 * 1024 * 2688, 40),
        (SAME | QWEN3_NEXT, 48 * 512 * 3 * 2048 * 512, 36),
    ],
    ids=["Nano", "Super", "Qwen3-Next"],
)
def test_the_parts_of_recurrent_models_add_up(
    tmp_path: Path, fields: dict[str, Any], experts: int, recurrent: int
) -> None:
    """A second copy divides only the experts, so the two plans together give each part of the parameters."""
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = check_model(config_card("m", tmp_path))
    config = model.card.config
    assert len(config.recurrent_layers) == recurrent

    def plan(**options: Any) -> dict[str, int]:
        parts = plan_vllm(model, Device("gpu", 999 * GIB), options, adapters=1, rank=8, context=1024, slots=8)
        return {part.name: part.size_bytes for part in parts}

    one, two = plan(), plan(data_parallel_size=2)
    divided = 2 * (one["weights of vLLM"] - two["weights of vLLM"])
    assert divided == 2 * experts
    ends = 2 * config.vocab_size * config.hidden_size
    others = model.parameters - experts - ends
    assert config.attention_numel < others
    assert plan(quantization="fp8_per_tensor")["weights of vLLM"] == 2 * ends + others + experts
    assert one["states of recurrent layers"] == 8 * config.state_bytes > 0
    assert plan(tensor_parallel_size=2)["states of recurrent layers"] == 4 * config.state_bytes
    d, products = config.hidden_size, 1 + len(config.gate.parts)
    attention = len(config.attention_layers) * (4 * d + config.query_size + 2 * config.kv_size + config.q_size)
    width = config.expert_size + config.moe_intermediate_size
    pairs = len(config.mixture_layers) * config.num_experts * products * width
    shared = len(config.mixture_layers) * products * (d + config.shared_intermediate_size)
    assert one["room for adapters"] == 2 * 8 * (attention + pairs + shared)
    assert min([*one.values(), *two.values()]) > 0


def test_room_for_adapters_of_latent_attention_is_what_tinker_counts_of_it(tmp_path: Path) -> None:
    """DeepSeek-V3.1. Here each expert has a pair of its own, unlike Tinker's."""
    fields = SAME | PUBLISHED["DeepseekV3ForCausalLM"][1] | {"architectures": ["DeepseekV3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = check_model(config_card("m", tmp_path))
    parts = plan_vllm(model, Device("gpu", 9999 * GIB), {}, adapters=1, rank=8, context=1024, slots=8)
    (room,) = [part.size_bytes for part in parts if part.name == "room for adapters"]
    _, attention, _ = OF_TINKER["DeepseekV3ForCausalLM"]
    dense, expert = 3 * 3 * (7168 + 18432), 3 * (7168 + 2048)
    assert room == 2 * 8 * (attention + dense + 58 * (256 + 1) * expert)


def test_what_is_started_here_is_held_against_the_gpus_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.server.workers.memory_plan.free_bytes", lambda: 400 * GIB)
    monkeypatch.setattr("api.server.workers.memory_plan.cuda_bytes", lambda: [80 * GIB] * 4)
    cards = {"30B-A3B": card(tmp_path, "30B-A3B")}

    def settings(**vllm: Any) -> Settings:
        generator = {"replicas": ["vllm"], "device": "cuda", "vllm": {"max_adapters": 2, "max_rank": 8, **vllm}}
        return load_settings(None, data_dir=tmp_path, generator=generator, trainer={"device": "cuda:3"})

    _, tables = planned(settings(options={"tensor_parallel_size": 2}), cards)
    assert "vLLM of 30B-A3B, on 2 x cuda:0, each" in tables[0]
    with pytest.raises(DoesNotFit, match="take cuda:0 to cuda:7, and there are 4 GPUs"):
        planned(settings(options={"tensor_parallel_size": 4, "data_parallel_size": 2}), cards)
    with pytest.raises(DoesNotFit, match=r"weights; cuda:3 has 80.0 GiB, of which 72.0 GiB are taken"):
        planned(settings(options={"tensor_parallel_size": 4}), cards)
    monkeypatch.setattr("api.server.workers.memory_plan.cuda_bytes", lambda: [])
    with pytest.raises(DoesNotFit, match="kv_offloading_size needs a GPU, and there is none here"):
        planned(settings(options={"kv_offloading_size": 4}), cards)
    with pytest.raises(DoesNotFit, match="is no multiple"):
        planned(settings(options={"tensor_parallel_size": 7}), cards)


def test_the_command_plans_a_vllm_beside_the_trainer(tmp_path: Path) -> None:
    card(tmp_path, "235B-A22B")
    config = tmp_path / "weft.toml"
    config.write_text(
        '[generator]\nengine = "vllm"\nvllm = { max_adapters = 4, max_rank = 8, options.tensor_parallel_size = 8, '
        "options.enable_expert_parallel = true }\n"
    )
    asked = ["plan", "--model", str(tmp_path / "235B-A22B"), "--gpu-gib", "141", "--gpus", "8", "--rank", "8"]
    shown = CliRunner().invoke(weftd, [*asked, "--config", str(config)])
    assert shown.exit_code == 0, shown.output
    trainer, vllm = shown.output.split("\n\n")
    assert "weights of the generator" not in trainer
    assert "vLLM of 235B-A22B, on 8 x GPU of 141 GiB, each" in vllm
    assert "slices of 8, experts whole" in vllm
    assert "4 of rank 8" in vllm
