"""What sharing costs in each family: a small random model of every row of the table, on the CPU, 1 thread.

    python bench/families.py [--json] [--quick] [--out FILE] [--only "Qwen3.5" ...]

The models are those of tests/workers/model/models.py (made by transformers) at a hidden size of 256. Per family, every
variant in turn, round after round, CPU time of the process, the minimum of the rounds:

- batched: 16 tenants with 64 tokens each, one pass, an adapter each on attention and MLP; one: the same tokens with one
  adapter. A step is forward, loss and backward, as in bench/trainer.py;
- peft: the 16 tenants one after another through transformers and peft, as both come from pip (four are timed). It gets
  the adapters that it can wrap (`peft_wraps`), those of linears; in a mixture that is attention alone, and `alike` is
  ours with the same. Of Qwen3.5's delta rule it wraps `in_proj_qkv` as a whole, and of Mamba-2 (Nemotron-3) `in_proj`;
  there it refuses `out_proj`: these adapters are made by peft and imported, and ours compute with factors of zeros for
  `out_proj`. Ling 2 has no class in transformers, and no peer here;
- distinct: a decode step of TorchEngine with 64 sequences and an adapter each; shared: with one adapter for all.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from bench.generator import BATCH, RANK, running, step_times, write_adapters
from bench.parts.peers import with_adapters
from bench.parts.results import asked, at_least, keep, machine, tell
from bench.parts.serving import as_workers_run
from bench.trainer import TIMED_ALONE, Batch, Tenants, measure, peft_step, step
from tests.workers.model.models import FAMILIES, ours, reference
from workers.model.adapters.adapter import Adapter, load_adapter
from workers.model.adapters.imported import read_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder
from workers.model.families.table import FAMILIES as TABLE
from workers.model.lora.rows import LoraRows

TENANTS, TOKENS = 16, 64
GOAL = 0.9
#: The sizes of all models, as far as their families have them.
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
#: Sizes of single families.
OWN_SIZES: dict[str, Any] = {
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "ssm_state_size": 64,
    "moe_shared_expert_intermediate_size": 128,
}
NO_PEER = ("bailing",)
#: The modules that peft wraps in a model with Mamba-2.
OF_MAMBA = ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
ROUNDS, STEP_ROUNDS = 5, 20


def models() -> dict[str, str]:
    """The first tiny model of each family, by the family's name."""
    found: dict[str, str] = {}
    for model, (model_class, _, _) in FAMILIES.items():
        found.setdefault(TABLE[model_class.__name__].name, model)
    return found


def made(model: str) -> Any:
    """The transformers model at our sizes. With latent attention there are as many key-value heads as heads."""
    own = FAMILIES[model][2]
    sizes = SIZES | {key: size for key, size in OWN_SIZES.items() if own.get(key) is not None}
    if "kv_lora_rank" in own:
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": sizes["qk_rope_head_dim"]}
    return reference(model, **sizes)


def measured(model: str, folder: Path, rounds: int, step_rounds: int) -> dict[str, Any]:
    theirs = made(model)
    decoder = ours(theirs, folder / "model")
    works, wraps = steps(decoder, None if model in NO_PEER else theirs, folder / "peft")
    seconds = measure(works, rounds)
    in_turn = {"peft": TENANTS / TIMED_ALONE}
    places = write_adapters(folder / "adapters", BATCH, RANK, decoder.config)
    engines = {"distinct": running(decoder, places), "shared": running(decoder, places[:1] * BATCH)}
    return {
        "parameters": sum(weight.numel() for weight in decoder.parameters()),
        "peft_wraps": wraps,
        "cpu_ms": {name: round(1e3 * took * in_turn.get(name, 1), 1) for name, took in seconds.items()},
        "step_cpu_ms": step_times(engines, step_rounds),
    }


def steps(decoder: Decoder, theirs: Any | None, folder: Path) -> tuple[dict[str, Callable[[], None]], list[str]]:
    """The variants of a training step, and the modules that peft wraps."""
    batch, all_tokens = Batch(TENANTS, TOKENS), [0, TENANTS * TOKENS]
    every = Tenants.of(AdapterShape(decoder.config, RANK, train_unembed=False), TENANTS)

    def batched(tenants: Tenants) -> None:
        step(decoder, batch, tenants.rows(range(TENANTS), TOKENS))

    def one() -> None:
        step(decoder, batch, LoraRows(all_tokens, every.adapters[:1], every.grads[:1]))

    works: dict[str, Callable[[], None]] = {"batched": partial(batched, every), "one": one}
    if theirs is None:
        return works, []
    peer, alike = of_mamba(decoder, theirs, folder) if decoder.config.mamba else of_linears(every, theirs, folder)
    works["peft"] = peft_step(peer, Batch(1, TOKENS), TIMED_ALONE)
    if alike is not every:
        works["alike"] = partial(batched, alike)
    return works, sorted({str(module).rpartition(".")[2] for module in peer.peft_config["a0"].target_modules})


def of_linears(every: Tenants, theirs: Any, folder: Path) -> tuple[Any, Tenants]:
    """The model with four of our adapters as we export them, and our tenants with the same modules."""
    shape = every.adapters[0].shape
    theirs_too = replace(shape, train_mlp=not shape.config.num_experts, whole=True)
    alike = every if theirs_too.slots == shape.slots else Tenants.of(theirs_too, TENANTS)
    return with_adapters(theirs, alike.adapters[:TIMED_ALONE], folder, trainable=True), alike


def of_mamba(decoder: Decoder, theirs: Any, folder: Path) -> tuple[Any, Tenants]:
    """The model with four adapters made by peft, and our tenants with these, imported."""
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=OF_MAMBA, init_lora_weights=False)
    peer = get_peft_model(theirs, lora, adapter_name="a0")
    for number in range(1, TIMED_ALONE):
        peer.add_adapter(f"a{number}", lora)
    peer.save_pretrained(folder)
    made = []
    for number in range(TENANTS):
        place = folder / f"ours-{number}"
        place.mkdir()
        read_adapter(folder / f"a{number % TIMED_ALONE}", decoder.config).write(place, "tiny")
        made.append(load_adapter(place, decoder.config).adapter)
    return peer, Tenants(made, [Adapter.zeros(adapter.shape) for adapter in made])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = asked(__doc__, quick="one round of each: to see that it runs")
    parser.add_argument("--only", nargs="*", default=list(models()), choices=list(models()), metavar="FAMILY")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rounds, step_rounds = (1, 1) if args.quick else (ROUNDS, STEP_ROUNDS)
    result: dict[str, Any] = {
        "bench": "families",
        "compares": "variants of one pass and of one step, in this process; peft by its own code",
        "machine": machine(),
        "claims": [],
        "families": {},
    }
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(models()[name], Path(folder), rounds, step_rounds)
        result["families"][name] = found
        value = found["cpu_ms"]["one"] / found["cpu_ms"]["batched"]
        what = f"{name}: {TENANTS} tenants x {TOKENS} tokens, one adapter / batched"
        result["claims"].append(at_least(what, value, GOAL))
        print(name, json.dumps(found), file=sys.stderr, flush=True)
        keep(result, args)
    tell(result, args)


if __name__ == "__main__":
    as_workers_run()
    main()
