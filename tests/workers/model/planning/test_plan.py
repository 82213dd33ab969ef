"""The plan of memory: against what the CPU really allocates, for well-known machines, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from api.cli import weftd
from api.server.workers.memory_plan import planned
from store.load_settings import load_settings
from tests.workers.model.models import ours, reference
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.shape import AdapterShape
from workers.model.card import ModelCard, config_card
from workers.model.native.gemm import packed
from workers.model.planning.check import check_model
from workers.model.planning.plan import Device, DoesNotFit, Plan, Wanted, gib, plan
from workers.trainer.runs.arena import Arena, ArenaKind

GIB = 1 << 30
QWEN3: dict[str, Any] = {
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MOE: dict[str, Any] = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}  # fmt: skip
#: The shapes as published.
SHAPES: dict[str, dict[str, Any]] = {
    "4B": {
        **QWEN3, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 9728,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "30B-A3B": {
        **MOE, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_hidden_layers": 48,
    },
    "235B-A22B": {
        **MOE, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_attention_heads": 64, "num_hidden_layers": 94,
    },
}  # fmt: skip


@pytest.fixture
def folder_of(tmp_path: Path) -> Any:
    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SHAPES[name]))
        return folder

    return make


def sizes(found: Plan) -> dict[str, int]:
    return {part.name: part.size_bytes for part in found.parts}


@pytest.mark.parametrize("family", ["moe", "qwen3-tied", "gpt-oss", "deepseek", "qwen3-next", "nemotron-h"])
def test_the_arithmetic_is_what_the_cpu_allocates(family: str, tmp_path: Path) -> None:
    decoder = ours(reference(family), tmp_path)
    model = check_model(ModelCard("m", tmp_path, decoder.config, ()), "float32")
    wanted = Wanted(slots=3, kv_tokens=640, context_tokens=128, packed=True, rank=5, resident_bytes=1 << 20)
    found = plan([model], Device("cpu", 8 * GIB), wanted)
    engine = TorchEngine(decoder, (), slots=found.slots, context=128, kv_tokens=found.kv_tokens)
    cache = engine._cache
    routes = cache.routes_NPMC.nbytes
    kept = sum(tensor.nbytes for tensor in cache.tensors) - routes
    page = kept // (cache.pages + 1)  # one that no sequence holds
    assert sizes(found)["keys and values"] == kept - page + routes
    assert sizes(found)["weights of the trainer"] == sum(weight.nbytes for weight in decoder.parameters())
    assert sizes(found).get("states of sequences", 0) == found.slots * decoder.config.state_bytes
    panels = [packed(weight) for weight in decoder.products()]
    there = sum(each._panels.nbytes for each in panels if each is not None)
    tables = sum(weight.nbytes for weight in decoder.parameters()) - sum(w.nbytes for w in decoder.products())
    planned_bytes = sizes(found)["packed weights of the generator"]
    assert there <= planned_bytes + 64 * 4 * 4096  # the last panel is padded
    assert planned_bytes - there < tables + 4096
    arena = Arena(ArenaKind(AdapterShape(decoder.config, 5), 1.0, 2), torch.device("cpu"))
    note = next(part.note for part in found.parts if part.name == "runs in training")
    assert note.startswith(f"{(1 << 20) // arena.flat.nbytes} of rank 5")
    kept_adapters = next(part for part in found.parts if part.name == "adapters in use")
    one = arena.flat.nbytes // 4  # the weights, without gradient and moments
    count = kept_adapters.size_bytes // one
    assert kept_adapters.note == f"of the generator: {count:,} of rank 5, {gib(one)} each"


def test_a_mixture_of_30_billion_on_one_gpu(folder_of: Any) -> None:
    """The GPU has 141 GiB: the base twice takes 114, and the rest is enough for 64 sequences and a few runs."""
    model = check_model(config_card("30B-A3B", folder_of("30B-A3B")))
    gpu = Device("gpu", 141 * GIB)
    found = plan([model], gpu, Wanted(tenants=64))
    assert sizes(found)["weights of the trainer"] == sizes(found)["weights of the generator"] == 2 * 30_532_122_624
    assert found.used_bytes <= 141 * GIB
    assert found.slots >= 16
    assert found.kv_tokens >= 2 * 8192
    runs = 16 * AdapterShape(model.card.config, 32).numel
    assert found.resident_bytes >= runs
    assert found.paged.size_bytes == (64 - found.resident_bytes // runs) * runs
    once = plan([model], gpu, replace(Wanted(tenants=64), one_base=True))
    assert once.kv_tokens > 2 * found.kv_tokens
    with pytest.raises(DoesNotFit, match=r"generator.kv_tokens = 262,144 takes 24.2 GiB .*: at most [\d,]+ tokens fit"):
        plan([model], gpu, Wanted(kv_tokens=262_144))
    ranks = replace(Wanted(), trainers=4, ranks=4, one_base=True)
    assert sizes(plan([model], Device("cpu", 999 * GIB), ranks))["weights"] == model.weight_bytes
    apart = sizes(plan([model], Device("cpu", 999 * GIB), replace(ranks, one_base=False)))
    assert apart["weights of the trainer"] == apart["weights of the generator"] == model.weight_bytes
    with pytest.raises(DoesNotFit, match=r"models: 30B-A3B takes 56.9 GiB .* 80.0 GiB, of which 56.9 GiB are taken"):
        plan([model], Device("gpu", 80 * GIB), Wanted())
    assert plan([model], Device("gpu", 80 * GIB), Wanted(generators=0)).resident_bytes >= runs
    for there, told in ({"generators": 0}, {"trainer"}), ({"trainers": 0}, {"generator"}):
        lines = plan([model], gpu, replace(Wanted(), **there)).lines()
        assert {line.partition(".")[0] for line in lines if " = " in line} == told
        assert ("runs paged out" in "".join(lines)) == ("trainer" in told)


def test_ranks_that_own_experts(folder_of: Any, tmp_path: Path) -> None:
    """Without the experts 235B takes 16 GB and 30B 3 GB: a rank has that, and its share of the experts."""
    card = config_card("235B-A22B", folder_of("235B-A22B"))
    model = check_model(card)
    experts = 94 * 128 * 3 * 4096 * 1536
    owned = Wanted(generators=0, owned=True, microbatch_tokens=8192, rank=8)
    found = plan([model], Device("gpu", 141 * GIB, 8), owned)
    assert sizes(found)["weights of the trainer"] == 2 * (experts // 8 + model.parameters - experts)
    assert sizes(found)["weights of the trainer"] < 73e9
    in_parts = plan([model], found.device, replace(owned, owned=False))
    activations = "activations of the trainer"
    travelling = sizes(found)[activations] - sizes(in_parts)[activations]
    assert travelling == 8192 * 8 * 4096 * 2 * 6
    host = plan([model], Device("cpu", 4096 * GIB), replace(owned, trainers=4, ranks=4))
    assert sizes(host)["weights of the trainer"] == 2 * (experts + 4 * (model.parameters - experts))
    with pytest.raises(DoesNotFit, match=r"235B-A22B: 6 ranks cannot own its 128 experts in equal shares: set .all."):
        plan([model], Device("gpu", 999 * GIB, 6), owned)
    dense = check_model(config_card("4B", folder_of("4B")))
    with pytest.raises(DoesNotFit, match="4B: it has no experts that ranks could own"):
        plan([dense], Device("gpu", 80 * GIB, 2), owned)
    config = tmp_path / "weft.toml"
    config.write_text('[trainer]\nshard = "experts"\nranks = 8\n')
    shown = weftd_plan(folder_of("30B-A3B"), "--gpu-gib", "141", "--gpus", "8", "--config", str(config))
    assert re.search(r"weights of the trainer +9\.6 GiB  one of 8 shares of the experts, and the rest", shown)


def test_the_command_plans_small_and_large_models(folder_of: Any) -> None:
    small = weftd_plan(folder_of("4B"), "--gpu-gib", "24")
    assert re.search(r"^weights +7\.5 GiB  one copy for 2 workers$", small, re.MULTILINE)
    assert setting(small, "generator.slots") >= 16
    assert setting(small, "trainer.resident_bytes") >= 2 * (1 << 30)
    large = weftd_plan(folder_of("235B-A22B"), "--gpu-gib", "141", "--gpus", "8", "--rank", "8")
    assert "8 x GPU of 141 GiB, each" in large
    assert "a part of 8: only vLLM does that" in large
    assert "one copy" not in large  # ranks have a part each
    assert re.search(r"^processes and libraries +1\.5 GiB$", large, re.MULTILINE)
    assert re.search(r"^weights of the generator +54\.7 GiB", large, re.MULTILINE)
    assert re.search(r"^runs in training .* [1-9]\d* of rank 8", large, re.MULTILINE)
    refused = CliRunner().invoke(weftd, ["plan", "--model", str(folder_of("235B-A22B")), "--gpu-gib", "141"])
    assert refused.exit_code == 2
    assert "models: 235B-A22B takes 437.9 GiB for weights" in refused.output
    long = ["plan", "--model", str(folder_of("4B")), "--gpu-gib", "20", "--context", "40000"]
    refused = CliRunner().invoke(weftd, long)
    assert refused.exit_code == 2
    assert "generator.context_tokens = 40,000 takes 5.5 GiB for keys and values" in refused.output


@pytest.mark.parametrize(("gib", "kv_tokens", "runs"), [("141", 29 * 8192, 3), ("80", 4 * 8192, 1)])
def test_the_command_plans_the_30b_on_one_gpu(
    folder_of: Any, tmp_path: Path, gib: str, kv_tokens: int, runs: int
) -> None:
    """With one copy, and a process that holds it. With a copy for each worker the smaller GPU has no room for a run."""
    folder = folder_of("30B-A3B")
    shared = weftd_plan(folder, "--gpu-gib", gib)
    assert re.search(r"^weights +56\.9 GiB  one copy for 2 workers$", shared, re.MULTILINE)
    assert re.search(r"^processes and libraries +2\.2 GiB$", shared, re.MULTILINE)
    assert setting(shared, "generator.kv_tokens") >= kv_tokens
    assert re.search(rf"^runs in training .* {runs} of rank 32, 7\.4 GiB each$", shared, re.MULTILINE)
    (tmp_path / "weft.toml").write_text('base_dir = ""\n')
    command = ["plan", "--model", str(folder), "--gpu-gib", gib, "--config", str(tmp_path / "weft.toml")]
    apart = CliRunner().invoke(weftd, command)
    if gib == "141":
        assert setting(apart.output, "generator.kv_tokens") < setting(shared, "generator.kv_tokens") / 4
        assert re.search(r"^processes and libraries +1\.5 GiB$", apart.output, re.MULTILINE)
    else:
        assert apart.exit_code == 2


def test_adapters_have_an_eighth_of_what_is_free_or_room_for_one(folder_of: Any) -> None:
    """An adapter of rank 32 takes 1.8 GiB. What adapters get beyond 2 GiB is taken from keys and values, not from
    runs."""
    model = check_model(config_card("30B-A3B", folder_of("30B-A3B")))
    one, shared = 4 * AdapterShape(model.card.config, 32).numel, Wanted(one_base=True)
    found = {size_gib: plan([model], Device("gpu", size_gib * GIB), shared) for size_gib in (78, 141)}
    for size_gib, most in ((78, 1), (141, 3)):
        size = sizes(found[size_gib])["adapters in use"]
        assert size == found[size_gib].adapter_cache_bytes
        assert size // one == most
    told = plan([model], Device("gpu", 141 * GIB), replace(shared, adapter_cache_bytes=2 * GIB))
    assert (told.adapter_cache_bytes, sizes(told)["adapters in use"]) == (2 * GIB, 2 * GIB)
    assert abs(told.resident_bytes - found[141].resident_bytes) < 1 << 24
    assert told.kv_tokens > found[141].kv_tokens
    less_than_one = plan([model], Device("gpu", 75 * GIB), shared)
    note = next(part.note for part in less_than_one.parts if part.name == "adapters in use")
    assert less_than_one.adapter_cache_bytes == one
    assert note == "of the generator: 0 of rank 32, 1.8 GiB each; the first is let in all the same"
    several = plan([model, model], Device("gpu", 300 * GIB), replace(shared, generators=2))
    assert sizes(several)["adapters in use"] // 4 == several.adapter_cache_bytes > 2 * GIB
    with pytest.raises(DoesNotFit, match=r"generator.adapter_cache_bytes = 32,212,254,720 takes 30.0 GiB"):
        plan([model], Device("gpu", 78 * GIB), replace(shared, adapter_cache_bytes=30 * GIB))
    tight = plan([check_model(config_card("4B", folder_of("4B")))], Device("gpu", 24 * GIB), Wanted())
    assert (
        tight.adapter_cache_bytes
        == 4 * AdapterShape(check_model(config_card("4B", folder_of("4B"))).card.config, 32).numel
    )


@pytest.mark.parametrize("one_base", [True, False])
def test_a_plan_never_takes_more_than_there_is(folder_of: Any, one_base: bool) -> None:
    model = check_model(config_card("4B", folder_of("4B")))
    fits = 0
    for tenths in range(100, 400, 3):
        try:
            found = plan([model], Device("gpu", tenths * GIB // 10), Wanted(one_base=one_base))
        except DoesNotFit:
            assert not fits
            continue
        fits += 1
        assert found.used_bytes <= found.device.size_bytes
    assert fits > 30


def weftd_plan(folder: Path, *options: str) -> str:
    shown = CliRunner().invoke(weftd, ["plan", "--model", str(folder), *options])
    assert shown.exit_code == 0, shown.output
    return shown.output


def setting(shown: str, name: str) -> int:
    return int(next(line.split(" = ")[1] for line in shown.splitlines() if line.startswith(name)))


def test_models_in_folders_of_one_name_are_planned_together(folder_of: Any, tmp_path: Path) -> None:
    """Two owners may both have a model `main`: a plan for the last one alone would leave no room for the other."""
    paths = [tmp_path / owner / "main" for owner in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.symlink_to(folder_of("4B"))
    one = weftd_plan(paths[0], "--gpu-gib", "80")
    both = weftd_plan(paths[0], "--gpu-gib", "80", "--model", str(paths[1]))
    assert setting(both, "trainer.resident_bytes") < setting(one, "trainer.resident_bytes")


def test_a_server_chooses_by_its_own_memory_and_keeps_to_what_it_is_told(
    folder_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.server.workers.memory_plan.cuda_bytes", lambda: [])
    monkeypatch.setattr("api.server.workers.memory_plan.free_bytes", lambda: 40 * GIB)
    cards = {"4B": config_card("4B", folder_of("4B"))}
    settings = planned(load_settings(None, data_dir=tmp_path, base_dir=""), cards)[0]
    assert not settings.generator.packed  # 15 GiB twice, and no room for a third
    assert 8192 <= settings.generator.kv_tokens < 32 * 8192
    shared = planned(load_settings(None, data_dir=tmp_path, base_dir=str(tmp_path)), cards)[0]
    assert shared.generator.kv_tokens > settings.generator.kv_tokens
    assert shared.trainer.resident_bytes > settings.trainer.resident_bytes
    generator = {"slots": 3, "kv_tokens": 16384, "packed": False, "adapter_cache_bytes": 1 << 30}
    told = load_settings(None, data_dir=tmp_path, generator=generator)
    assert planned(told, cards)[0].generator == told.generator
    alone = planned(load_settings(None, data_dir=tmp_path), cards, "trainer")[0]
    assert alone.trainer.resident_bytes == 0  # it does not know what else its machine runs
    monkeypatch.setattr("api.server.workers.memory_plan.cuda_bytes", lambda: [24 * GIB, 80 * GIB])
    apart = load_settings(None, data_dir=tmp_path, trainer={"device": "cuda:1"})
    found, tables = planned(apart, cards)
    assert len(tables) == 2
    assert found.trainer.resident_bytes > 50 * GIB
    assert found.generator.slots * 1024 <= found.generator.kv_tokens


@pytest.mark.parametrize(
    ("sizes", "told", "tokens"),
    [
        ([], {}, (2048, 4096)),  # a CPU
        ([141], {}, (8192, 16384)),
        ([80], {}, (4096, 8192)),
        ([24], {}, (2048, 4096)),
        ([141], {"ranks": 4}, (8192, 32768)),
        ([141], {"microbatch_tokens": 512}, (512, 4096)),
        ([141], {"pass_tokens": 777}, (8192, 777)),
    ],
    ids=str,
)
def test_a_gpu_trains_as_much_at_once_as_it_has_room_for(
    folder_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    sizes: list[int], told: dict[str, int], tokens: tuple[int, int],
) -> None:  # fmt: skip
    """Seen on an H200: with the sizes that suit a CPU, launches took longer than the kernels."""
    monkeypatch.setattr("api.server.workers.memory_plan.cuda_bytes", lambda: [size * GIB for size in sizes])
    monkeypatch.setattr("api.server.workers.memory_plan.free_bytes", lambda: 64 * GIB)
    cards = {"4B": config_card("4B", folder_of("4B"))}
    trainer = planned(load_settings(None, data_dir=tmp_path, trainer=told), cards)[0].trainer
    assert (trainer.microbatch_tokens, trainer.pass_tokens) == tokens
