"""How many GPUs one trainer and one generator of a model need at least, by the plans of memory (`weftd simulate`)."""

from __future__ import annotations

from scheduler.simulator.division import Owned, Shape
from workers.model.card import DecoderConfig, ModelCard
from workers.model.planning.check import Check, check_model
from workers.model.planning.plan import Device, DoesNotFit, Wanted, plan
from workers.model.planning.vllm_plan import plan_vllm

#: With more ranks than this, a base would be in more parts than a cluster has GPUs.
_MOST = 1024
#: What a generator of several GPUs is planned for: adapters, their rank, positions of one sequence.
ADAPTERS, RANK, CONTEXT = 8, 8, 8192


def shape_of(card: ModelCard, gpu_bytes: int, slots: int) -> Shape:
    """The shape of a model for the simulator. In a pass each layer but the last two is gathered twice, the rest once.
    Raises DoesNotFit if no number of such GPUs holds the model."""
    model, config = check_model(card), card.config
    ends = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
    item = model.weight_bytes // model.parameters
    layers_bytes = model.weight_bytes - item * ends
    return Shape(
        weight_bytes=model.weight_bytes,
        gathered_bytes=model.weight_bytes + layers_bytes * max(0, config.num_layers - 2) // config.num_layers,
        active_parameters=config.active_parameters,
        kv_bytes_per_token=model.kv_bytes_per_token,
        ranks=_ranks(model, gpu_bytes),
        gpus=_gpus(model, gpu_bytes, slots),
        pair_operations=_pair_operations(config),
        owned=_owned(model, gpu_bytes) if config.num_experts else None,
    )


def _pair_operations(config: DecoderConfig) -> int:
    """Operations for each pair of tokens. Scores and values take 2 operations for each number of a head, over half of
    the pairs, since attention is causal: once in the forward, again when it is recomputed; the backward has five
    products of that size instead of two (arXiv:2205.14135). Layers with a window are left out: their pairs grow with
    the tokens only, and there are few of them."""
    whole = sum(config.window_of(layer) == 0 for layer in config.attention_layers)
    return whole * 9 * (config.q_size + config.out_size) // 2


def _owned(model: Check, gpu_bytes: int) -> Owned | None:
    """The shape with owned experts; None if no number of such GPUs can own them. In forward, recomputation and backward
    each pair of a token and its expert sends `expert_size` numbers to the owner and gets as many back
    (workers/model/owned); besides, float32 columns of the adapters' products, and three times 8 bytes for the expert's
    number or weight."""
    config, item = model.card.config, model.weight_bytes // model.parameters
    try:
        ranks = _ranks(model, gpu_bytes, owned=True)
    except DoesNotFit:
        return None
    parts = 1 + len(config.gate.parts)
    layers, inner = len(config.mixture_layers), config.moe_intermediate_size
    pair_bytes = 6 * item * config.expert_size + 3 * 4 * parts * RANK + 3 * 8
    return Owned(
        experts=config.num_experts,
        ranks=ranks,
        active=layers * config.experts_per_token * parts * config.expert_size * inner,
        token_bytes=layers * config.experts_per_token * pair_bytes,
        adapter_bytes=3 * 4 * layers * config.num_experts * parts * inner * RANK,
    )


def _ranks(model: Check, gpu_bytes: int, *, owned: bool = False) -> int:
    ranks, wanted = 1 + owned, Wanted(generators=0, microbatch_tokens=8192, rank=RANK, owned=owned)
    while True:
        try:
            plan([model], Device("GPU", gpu_bytes, ranks), wanted)
            return ranks
        except DoesNotFit:
            if ranks >= _MOST:
                raise
            ranks *= 2


def _gpus(model: Check, gpu_bytes: int, slots: int) -> int:
    """How many GPUs a generator needs: one with our engine, else as many as vLLM needs."""
    try:
        plan([model], Device("GPU", gpu_bytes), Wanted(trainers=0, slots=min(slots, 64)))
        return 1
    except DoesNotFit:
        gpus = 2
    while True:
        options = {"tensor_parallel_size": gpus, "enable_expert_parallel": bool(model.card.config.num_experts)}
        try:
            device = Device("GPU", gpu_bytes)
            plan_vllm(model, device, options, adapters=ADAPTERS, rank=RANK, context=CONTEXT, slots=slots)
            return gpus
        except DoesNotFit:
            if gpus >= model.card.config.num_heads:
                raise
            gpus *= 2
