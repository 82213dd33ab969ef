"""Makes docs/models.md of the table of families: `python -m tools.models_page`."""

from __future__ import annotations

from pathlib import Path

from workers.model.families.rope import KINDS
from workers.model.families.table import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

_BEFORE = """# Models that are served

Made by `python -m tools.models_page` of the table in `workers/model/families/table.py`; do not edit it.

`weftd model check PATH` prints of a model folder its family, what is trained, the memory of weights, cache and
adapters; or the field of its config.json that is not supported, by name. `weftd serve` refuses the same models for
the same reasons, before anything is loaded. A field that this version does not know is refused when it is set,
because it may change what is computed.

| family | `architectures` | checkpoints, for example |
|---|---|---|
"""
_PARTS = """
## Parts

A layer is put together from the parts in `workers/model/parts/`; trainer and generator run the same ones.

| family | attention | MLP |
|---|---|---|
"""
_AFTER = """
Rotary embeddings: {rope}; over the whole head, or over its first part in families that have it so. SwiGLU is
down(silu(gate x) * up x), squared ReLU down(relu(up x)^2). Mamba-2's steps have no limit, as `time_step_limit` of
Nemotron's checkpoints says; transformers raises them to `time_step_min` where it computes many tokens at a time, which
changes what Nemotron says (pull request 48989 there) and is not done here.

Weights are read from safetensors, one file or shards, experts one by one or fused, in float32, bfloat16 or float16.
Block FP8 (128 x 128, as of DeepSeek and Qwen) and MXFP4 (gpt-oss) become bfloat16 tensor by tensor as they are read,
so they take the memory of bfloat16; so does int4 in groups of 32 (Kimi-K2-Thinking, K2.5, K2.6; pack-quantized weights
of compressed-tensors, with nothing else quantised). Kimi-K2 is a DeepSeek-V3 by its config and its tensors' names, and
so is the text model in Kimi-K2.5 and K2.6. Kimi's folders have their tokenizer as code of their own, which is not run:
put a `tokenizer.json` of the same vocabulary beside the weights. What a checkpoint holds for predicting several tokens
at once is not loaded.

## What is trained

| flag | linears |
|---|---|
| `train_attn` | `self_attn.q_proj`, `k_proj`, `v_proj`, `o_proj` |
| `train_attn`, Ling 2 | `attention.query_key_value` (one linear, one adapter), `attention.dense` |
| `train_attn`, latent attention | `q_a_proj` (`q_proj` where queries have no latent), `kv_a_proj_with_mqa`, `o_proj` |
| `train_attn`, gated delta rule | `linear_attn.in_proj_q`, `in_proj_k`, `in_proj_v`, `in_proj_z`, `out_proj` |
| the same, Qwen3-Next | `linear_attn.in_proj_qkvz`, `in_proj_ba`, `out_proj` |
| the same, Mamba-2 | of `mixer.in_proj` the gate and the values, each with a pair of factors; `mixer.out_proj` |
| `train_mlp` | `gate_proj`, `up_proj`, `down_proj`: of a dense MLP, of every expert, of shared experts |
| the same, Nemotron | `mixer.up_proj`, `down_proj`; `mixer.fc1_latent_proj`, `fc2_latent_proj` |
| `train_unembed` | `lm_head`, also where it is tied to the embedding (which stays as it is) |

Where attention has an output gate, `q_proj` projects it, too. Routers, norms, biases, embeddings, convolutions, decays
and the gates of shared experts are frozen, and in latent attention `q_b_proj` and `kv_b_proj`, which Tinker's
count of parameters leaves out too (`get_lora_param_count` of its cookbook); an adapter that has them is refused by
name. All experts of a layer share the factor on the hidden side (`docs/design.md`). Exports name modules as
transformers 5 does (`mlp.experts.N.gate_proj`), in every family but Mixtral, whose experts PEFT and vLLM know by the
names of its checkpoints alone (`block_sparse_moe.experts.N.w1`); adapters with either names are imported. Ling 2, for
which transformers has no class, is named as in its checkpoints.

Adapters of Qwen3.5 and 3.6, DeepSeek-V3.1, Kimi-K2.5 and K2.6, gpt-oss-20b, Nemotron 3 Nano and Super have as many
parameters as `get_lora_param_count` says.

Of Qwen3.5's gated delta rule Tinker trains queries, keys, values and gates, a pair of factors each, and leaves rates
and decays (`in_proj_b`, `in_proj_a`) as they are. In Tinker's layout they are `in_proj_q`, `in_proj_k`, `in_proj_v` and
`in_proj_z`; the first three are parts of the checkpoint's `in_proj_qkv`, for which PEFT's layout has one pair of three
times the rank (`rank_pattern`), whose B has a block for each and is else zero: exactly the same adapter. What stock
PEFT trains, one pair for `in_proj_qkv`, one for `in_proj_z`, and for `in_proj_b` and `in_proj_a` or not, is imported,
trained as it is, and exported for stock PEFT. Tinker has no Qwen3-Next, whose two projections mix all of that by key
heads: its adapters are stock PEFT's.

Of Nemotron's Mamba-2 Tinker trains a pair of factors each for the first two parts of `in_proj` and leaves the others
(what groups write with and read by, the steps) as they are. In Tinker's layout they are `mixer.gate_proj` and
`mixer.x_proj`, in PEFT's one pair of twice the rank in `in_proj` (`rank_pattern`). Stock PEFT refuses to wrap
`out_proj` in a model of the type `nemotron_h`, because kernels of mamba-ssm read its weight past the adapter;
transformers' own code does not, and with another `model.config.model_type` it loads an export and gives the server's
numbers. What stock PEFT trains of Nemotron, one pair for the whole of `in_proj` and none for `out_proj`, is imported,
trained as it is, and exported for stock PEFT.

Of a checkpoint that sees (`...ForConditionalGeneration`) the text model is served; a request with an image is refused.
Exports name its modules as `AutoModelForCausalLM` has them (of Kimi's: `DeepseekV3ForCausalLM`), `model.layers.N`;
adapters that name them `model.language_model.layers.N` or `language_model.model.layers.N` are imported as well.

## What they cost

The built-in price list names models of hosted Tinker's; any other costs what its `"*"` says, which `weftd serve` and
`weftd doctor` warn of, by name. `Qwen/Qwen3.8-27B` is one of these, because its price for training is not known: name
it under `[prices.models."Qwen/Qwen3.8-27B"]` in the file of `--config` (`docs/billing.md`).

## What the cache keeps of a token

Grouped-query attention: keys and values of the key-value heads. Latent attention: one latent and the turning part of
the key for all heads (`kv_lora_rank` + `qk_rope_head_dim` numbers a layer: 70 KB a token of DeepSeek-V3 in bfloat16,
where keys and values of its heads would be 5 MB). The prefix cache keeps the same, and so does what is set aside. On a
CUDA device decode steps of latent attention are launched piece by piece, not captured.

Layers with a sliding window keep what it reaches: pages of 32 positions before it are free again, while a prompt is
computed, too. In gpt-oss half of the layers have one, of 128 positions: a sequence of 4,096 takes 52 % of what it would
take if all were kept. Where a mixture has no layer without a window, or the two kinds cannot be parted into at most
four groups of equal size, all is kept; the prefix cache keeps whole prompts.

A gated delta rule or Mamba-2 keeps nothing of a token but a state of each sequence, in float32 (`weftd model check`
says how large). The prefix cache keeps states at some block ends, so a prompt may continue from there and not from the
last of its first common tokens. On a GPU these layers run kernels of fla-core where it is installed (the extra `gpu`)
and the base has 16 bits, else torch's own operations; steps are not captured.

## How it is held

`tests/workers/test_families.py` runs every family against transformers' own code (Ling 2 against plain torch after the
code that its checkpoints carry, `tests/workers/model/bailing.py`) and peft, on a tiny random model
that is saved as the family's checkpoints are: 100 greedy tokens with and without the prefix cache, log-probabilities
of prompts and samples, five training steps on everything, an adapter from peft and one to it, and that a run's
numbers are the same bits in any company. `tests/workers/model/test_decoder.py` holds logits to 2e-5,
`tests/workers/model/base/test_stored.py` quantised checkpoints to what transformers makes of them.
`test_options.py` beside it draws other options of each family's config: they are computed as transformers does, or
refused. `tests/workers/test_families_in_trouble.py` puts numbers that are not finite beside every family's runs and
requests, and replays its runs; with `-m long` it kills a trainer of each.
"""


def page() -> str:
    families = list(FAMILIES.values())
    rows = [
        f"| {family.name} | {_listed(family.architecture, *family.vision)} | {_listed(*family.checkpoints)} |\n"
        for family in families
    ]
    parts = [f"| {family.name} | {family.attention} | {family.mlp} |\n" for family in families]
    return _BEFORE + "".join(rows) + _PARTS + "".join(parts) + _AFTER.format(rope=", ".join(KINDS))


def _listed(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


if __name__ == "__main__":
    PAGE.write_text(page())
