"""The families that are served. Adding one is a reader of its config.json, its parts and a row here.

docs/models.md is made from this table, and tests/workers/test_families.py runs every row against transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.model.config import DecoderConfig
from workers.model.families import dense, hybrids, latent, mixtures
from workers.model.families.fields import Fields


@dataclass(frozen=True)
class Layout:
    """What published checkpoints of a family call their tensors, where families differ: the mixture, an MLP, its router
    with its correction, and gate, up and down of an expert; the embedding and the norm after the last layer; the norms
    before attention and MLP; attention, a recurrence in its place, its norms of queries and keys, and its products,
    where one is of queries, keys and values (`qkv`). `interleaved`: the experts are one tensor, in which gate and up
    alternate. `centred_norms`: the factors of norms are stored less one. Tensors whose names begin with one of `unused`
    are not loaded."""

    mixture: str = "mlp"
    mlp: str = "mlp"
    router: str = "gate"
    expert: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    interleaved: bool = False
    correction: str = "e_score_correction_bias"
    embedding: str = "embed_tokens"
    last_norm: str = "norm"
    layer_norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    attention: str = "self_attn"
    recurrence: str = "linear_attn"
    qkv: str = ""
    output: str = "o_proj"
    norms: tuple[str, str] = ("q_norm", "k_norm")
    centred_norms: bool = False
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """`architecture` is what config.json names; `vision` those of checkpoints that see and have this text model.
    `checkpoints` are examples of published ones. `attention` and `mlp` say in words what its layers are made of."""

    architecture: str
    name: str
    checkpoints: tuple[str, ...]
    attention: str
    mlp: str
    read: Callable[[Fields], DecoderConfig] = field(repr=False)
    layout: Layout = Layout()
    vision: tuple[str, ...] = ()


_GROUPED = "grouped-query, rotary"
_LATENT = "latent, queries too where the config has it so"
_SIGMOID = (
    "sigmoid scores with a correction, by groups, normalised and scaled, of SwiGLU experts; shared experts; "
    "the first layers dense"
)
_HYBRID = (
    "three layers in four (as the config says) gated delta rule with a short convolution and a gated norm, the others "
    "grouped-query with an output gate, rotary over a quarter of a head, q/k norm by head; zero-centred norms"
)

_QWEN3_5 = Layout(centred_norms=True, unused=("mtp.", "model.visual."))
_NEMOTRON_H = Layout(
    mlp="mixer",
    mixture="mixer",
    expert=("up_proj", "down_proj"),
    embedding="embeddings",
    last_norm="norm_f",
    layer_norms=("norm", "norm"),
    attention="mixer",
    recurrence="mixer",
    unused=("mtp.",),
)

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            "Llama 2, 3",
            ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B"),
            _GROUPED,
            "SwiGLU",
            dense.llama,
        ),
        Family(
            "Qwen2ForCausalLM",
            "Qwen2, Qwen2.5",
            ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B"),
            f"{_GROUPED}, biases on q, k and v, sliding window where the config has one",
            "SwiGLU",
            dense.qwen2,
        ),
        Family(
            "Qwen3ForCausalLM",
            "Qwen3",
            ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
            f"{_GROUPED}, q/k norm by head, sliding window where the config has one",
            "SwiGLU",
            dense.qwen3,
        ),
        Family(
            "MistralForCausalLM",
            "Mistral",
            ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.3"),
            f"{_GROUPED}, sliding window where the config has one",
            "SwiGLU",
            dense.mistral,
        ),
        Family(
            "Qwen3MoeForCausalLM",
            "Qwen3 MoE",
            ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B-Instruct-2507"),
            f"{_GROUPED}, q/k norm by head, sliding window where the config has one",
            "softmax top-k of SwiGLU experts, some layers dense where the config says so",
            mixtures.qwen3_moe,
        ),
        Family(
            "MixtralForCausalLM",
            "Mixtral",
            ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x22B-v0.1"),
            f"{_GROUPED}, sliding window where the config has one",
            "softmax top-k, normalised, of SwiGLU experts",
            mixtures.mixtral,
            Layout("block_sparse_moe", expert=("w1", "w3", "w2")),
        ),
        Family(
            "OlmoeForCausalLM",
            "OLMoE",
            ("allenai/OLMoE-1B-7B-0924", "allenai/OLMoE-1B-7B-0125-Instruct"),
            f"{_GROUPED}, q/k norm over all heads together",
            "softmax top-k, not normalised, of SwiGLU experts",
            mixtures.olmoe,
        ),
        Family(
            "Glm4MoeForCausalLM",
            "GLM-4.5, GLM-4.6",
            ("zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
            "grouped-query, rotary over half of a head, biases on q, k and v, q/k norm where the config has it",
            _SIGMOID,
            mixtures.glm4_moe,
        ),
        Family(
            "DeepseekV3ForCausalLM",
            "DeepSeek-V3, Kimi-K2",
            (
                "deepseek-ai/DeepSeek-V3.1",
                "moonshotai/Kimi-K2-Instruct-0905",
                "moonshotai/Kimi-K2-Thinking",
                "moonshotai/Kimi-K2.5",
                "moonshotai/Kimi-K2.6",
            ),
            f"{_LATENT}, rotary (YaRN)",
            _SIGMOID,
            latent.deepseek_v3,
            Layout(unused=("vision_tower.", "mm_projector.")),
            # As published, and as transformers calls its own class.
            ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        ),
        Family(
            "Glm4MoeLiteForCausalLM",
            "GLM-4.7-Flash",
            ("zai-org/GLM-4.7-Flash",),
            f"{_LATENT}, rotary",
            _SIGMOID,
            latent.glm4_moe_lite,
        ),
        Family(
            "BailingMoeV2ForCausalLM",
            "Ling 2, Ring 2",
            ("inclusionAI/Ling-mini-2.0", "inclusionAI/Ling-flash-2.0", "inclusionAI/Ring-1T"),
            "grouped-query, q, k and v one linear, rotary over half of a head, q/k norm by head",
            _SIGMOID,
            mixtures.bailing_moe_v2,
            Layout(
                correction="expert_bias",
                embedding="word_embeddings",
                attention="attention",
                qkv="query_key_value",
                output="dense",
                norms=("query_layernorm", "key_layernorm"),
            ),
        ),
        Family(
            "GptOssForCausalLM",
            "gpt-oss",
            ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
            "grouped-query, rotary (YaRN), biases, sinks, sliding window in every other layer",
            "softmax of the chosen logits, router bias, of clamped SwiGLU experts with biases",
            mixtures.gpt_oss,
            Layout(router="router", interleaved=True),
        ),
        Family(
            "Qwen3NextForCausalLM",
            "Qwen3-Next",
            ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking"),
            _HYBRID,
            "softmax top-k of SwiGLU experts; a shared expert with a gate; some layers dense where the config says so",
            hybrids.qwen3_next,
            Layout(centred_norms=True, unused=("mtp.",)),
        ),
        Family(
            "Qwen3_5ForCausalLM",
            "Qwen3.5, Qwen3.6, Qwen3.8 (text)",
            ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"),
            _HYBRID,
            "SwiGLU",
            hybrids.qwen3_5,
            _QWEN3_5,
            ("Qwen3_5ForConditionalGeneration",),
        ),
        Family(
            "Qwen3_5MoeForCausalLM",
            "Qwen3.5, Qwen3.6 MoE (text)",
            ("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B"),
            _HYBRID,
            "softmax top-k, normalised, of SwiGLU experts; a shared expert with a gate",
            hybrids.qwen3_5_moe,
            _QWEN3_5,
            ("Qwen3_5MoeForConditionalGeneration",),
        ),
        Family(
            "NemotronHForCausalLM",
            "Nemotron 3, Nemotron-H",
            ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"),
            "a layer is one of these or an MLP: mostly Mamba-2 with a short convolution and a gated norm by groups, a "
            "few grouped-query, no rotary",
            "squared ReLU, no gate; sigmoid scores with a correction, by groups, normalised and scaled, of such "
            "experts, latent where the config has it so; a shared expert",
            hybrids.nemotron_h,
            _NEMOTRON_H,
        ),
    )
}

#: The architectures of checkpoints that see, and the family of their text model.
VISION = {name: family.architecture for family in FAMILIES.values() for name in family.vision}

#: Matches the prefix that the text model's names have in checkpoints and adapters of models that see (in Kimi-K2.5 the
#: head's name, too), and in Nemotron's.
_ROOT = re.compile(r"^(model\.language_model|language_model\.model|backbone)\.|^language_model\.(?=lm_head\b)")


def plain_name(name: str) -> str:
    """The name in a checkpoint of the text model alone."""
    return _ROOT.sub(lambda found: "model." if found[1] else "", name)
