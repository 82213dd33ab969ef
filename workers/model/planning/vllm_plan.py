"""What one vLLM takes of each of its GPUs, and whether a model can be laid out on them; arithmetic alone.

vLLM takes `gpu_memory_utilization` of a GPU whoever else is there, and gives keys and values what weights, room for
adapters and work leave of it. That is known from the model's shape, so what cannot fit is refused here, by the name of
the setting, instead of minutes later in vLLM's log.

Tensor parallelism slices heads, MLPs and vocabulary over `tensor` GPUs; keys and values go with their heads, and where
there are fewer of those than GPUs each has a whole one. Copies (`data`) hold all of that again, but experts are over
all GPUs: in slices, or whole (`by_expert`). Room for an adapter is made in full, used or not (vLLM's layers of LoRA):
of a linear that is sliced at its outputs factor A is whole on each GPU, at its inputs factor B; the experts have a pair
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.model.config import DecoderConfig
from workers.model.planning.check import Check, kept_bytes
from workers.model.planning.plan import PAGE_TOKENS, PROCESS_BYTES, Device, DoesNotFit, Part, gib
from workers.model.planning.vllm_options import Layout

#: The share of a GPU's memory, unless `gpu_memory_utilization` says otherwise (vLLM's own default).
UTILIZATION = 0.9
#: How many tokens a step has room for (vLLM's max_num_batched_tokens for a server).
STEP_TOKENS = 8192
#: How many float32 copies of the logits a step has.
LOGIT_COPIES = 3


def check_layout(config: DecoderConfig, layout: Layout) -> None:
    """Raise DoesNotFit unless every part of the model can be divided among the GPUs."""
    t, all_of_them, at = layout.tensor, layout.gpus, "generator.vllm.options"
    divided = {"attention heads": config.num_heads}
    if config.num_kv_heads < t:
        if t % config.num_kv_heads:
            raise DoesNotFit(
                f"{at}.tensor_parallel_size = {t} is no multiple of the model's {config.num_kv_heads} heads of keys "
                "and values"
            )
    else:
        divided["heads of keys and values"] = config.num_kv_heads
    if config.dense_layers or not config.num_experts:
        divided["columns of the MLP"] = config.intermediate_size
    for name, count in divided.items():
        if count % t:
            raise DoesNotFit(f"{at}.tensor_parallel_size = {t} does not divide the model's {count} {name}")
    if layout.by_expert and not config.num_experts:
        raise DoesNotFit(f"{at}.enable_expert_parallel: the model has no experts")
    if config.num_experts:
        name, count = "columns of an expert", config.moe_intermediate_size
        if layout.by_expert:
            name, count = "experts", config.num_experts
        if count % all_of_them:
            raise DoesNotFit(f"{at}: {all_of_them} GPUs do not divide the model's {count} {name}")


def plan_vllm(
    model: Check, device: Device, options: Mapping[str, Any], *, adapters: int, rank: int, context: int, slots: int
) -> list[Part]:
    """The parts of each of its GPUs, of which `device` is one; the last is what is left for keys and values. `adapters`
    of `rank` have room in each. Raises DoesNotFit."""
    config, layout = model.card.config, Layout.of(options)
    check_layout(config, layout)
    share = options.get("gpu_memory_utilization", UTILIZATION)
    room = int(device.size_bytes * share)
    parts = [
        Part("weights of vLLM", _weight_bytes(model, layout, options), _said(layout)),
        Part("room for adapters", adapters * _adapter_bytes(config, layout, rank), f"{adapters} of rank {rank}"),
        Part("process and libraries", PROCESS_BYTES["cuda"]),
        *_states(config, layout, slots),
        Part("work of a step", _work_bytes(config, layout, slots), f"{STEP_TOKENS:,} tokens"),
    ]
    of = f"{share:g} of {device.name} is {gib(room)}"
    ways = {
        parts[0].name: "set [generator.vllm.options] tensor_parallel_size",
        parts[1].name: "set [generator.vllm] max_adapters or max_rank, or enable_expert_parallel",
    }
    taken = 0
    for part in parts:
        if taken + part.size_bytes > room:
            way_out = ways.get(part.name, "set [generator.vllm.options] tensor_parallel_size")
            raise DoesNotFit(
                f"generator.vllm: {gib(part.size_bytes)} for {part.name}; {of}, and {gib(taken)} are taken: {way_out}"
            )
        taken += part.size_bytes
    each = kv_bytes(model, layout, options)
    tokens = (room - taken) // each // PAGE_TOKENS * PAGE_TOKENS
    if tokens < context:
        raise DoesNotFit(
            f"generator.context_tokens = {context:,} takes {gib(context * each)} for keys and values of one sequence; "
            f"{of}, and {gib(taken)} are taken: at most {max(0, tokens):,} tokens fit"
        )
    return [*parts, Part("keys and values", tokens * each, f"{tokens:,} tokens of {each:,} bytes")]


def kv_bytes(model: Check, layout: Layout, options: Mapping[str, Any]) -> int:
    """Bytes of a token's keys and values, on each GPU."""
    heads = model.card.config.num_kv_heads if model.card.config.latent is None else 1
    whole = model.kv_bytes_per_token // (2 if str(options.get("kv_cache_dtype", "")).startswith("fp8") else 1)
    return whole * max(1, heads // layout.tensor) // heads


def _weight_bytes(model: Check, layout: Layout, options: Mapping[str, Any]) -> int:
    c, item = model.card.config, model.weight_bytes // model.parameters
    ends = (1 if c.tie_embeddings else 2) * c.vocab_size * c.hidden_size
    products = 1 + len(c.gate.parts)
    experts = len(c.mixture_layers) * c.num_experts * products * c.expert_size * c.moe_intermediate_size
    linear = 1 if options.get("quantization") else item  # embedding and head stay as they are
    others = item * ends + linear * (model.parameters - ends - experts)
    return -(-others // layout.tensor) + -(-linear * experts // layout.gpus)


def _adapter_bytes(config: DecoderConfig, layout: Layout, rank: int) -> int:
    """Bfloat16; of families whose adapters vLLM serves (`workers.generator.vllm.adapters`)."""
    c, t, d, products = config, layout.tensor, config.hidden_size, 1 + len(config.gate.parts)
    q, kv = c.q_size // t, max(c.kv_size // t, c.kv_size // c.num_kv_heads)
    attention = 3 * d + c.query_size // t + 2 * kv + q + d  # A and B of q, k, v; A and B of o
    if c.fused_qkv:
        attention -= 2 * d
    if c.latent:  # A and B of queries and of the latent, whole on each; A and B of o
        attention = 2 * d + (c.latent.q_rank or c.q_size // t) + c.latent.kept + c.out_size // t + d
    numbers = len(c.attention_layers) * attention
    numbers += len(c.dense_mlp_layers) * products * (d + c.intermediate_size // t)
    if c.shared_intermediate_size:
        numbers += len(c.mixture_layers) * products * (d + c.shared_intermediate_size // t)
    experts, width = c.num_experts, c.moe_intermediate_size // layout.gpus
    if layout.by_expert:
        experts, width = c.num_experts // layout.gpus, c.moe_intermediate_size
    numbers += len(c.mixture_layers) * experts * products * (c.expert_size + width)
    return 2 * rank * numbers


def _states(config: DecoderConfig, layout: Layout, slots: int) -> list[Part]:
    """The part of a GPU's memory for the states that recurrent layers keep of `slots` sequences; heads are sliced over
    GPUs."""
    size_bytes = slots * -(-config.state_bytes // layout.tensor)
    return [Part("states of recurrent layers", size_bytes, f"{slots} sequences")] if size_bytes else []


def _work_bytes(config: DecoderConfig, layout: Layout, slots: int) -> int:
    """An estimate: one layer's activations of a step in bfloat16, and the logits of all sequences."""
    return STEP_TOKENS * kept_bytes(config) // 2 + LOGIT_COPIES * 4 * slots * config.vocab_size // layout.tensor


def _said(layout: Layout) -> str:
    said = [f"slices of {layout.tensor}"] if layout.tensor > 1 else []
    said += [f"{layout.data} copies"] if layout.data > 1 else []
    said += ["experts whole"] if layout.by_expert else []
    return ", ".join(said)
