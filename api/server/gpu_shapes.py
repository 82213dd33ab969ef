"""How many GPUs one trainer and one generator of a model need at least, by the plans of memory (`weftd simulate`)."""

from __future__ import annotations

from scheduler.simulator.division import Shape
from workers.model.card import ModelCard
from workers.model.planning.check import Check, check_model
from workers.model.planning.plan import Device, DoesNotFit, Wanted, plan
from workers.model.planning.vllm_plan import plan_vllm

#: Beyond, a base is in more parts than a cluster has GPUs.
_MOST = 1024
#: What a generator of several GPUs has room for: adapters, their rank, positions of one sequence.
ADAPTERS, RANK, CONTEXT = 8, 8, 8192


def shape_of(card: ModelCard, gpu_bytes: int, slots: int) -> Shape:
    """Raises DoesNotFit when no number of such GPUs holds the model."""
    model, config = check_model(card), card.config
    ends = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
    item = model.weight_bytes // model.parameters
    return Shape(
        layer_bytes=model.weight_bytes - item * ends,
        end_bytes=item * ends,
        active_parameters=config.active_parameters,
        kv_bytes_per_token=model.kv_bytes_per_token,
        ranks=_ranks(model, gpu_bytes),
        gpus=_gpus(model, gpu_bytes, slots),
    )


def _ranks(model: Check, gpu_bytes: int) -> int:
    ranks, wanted = 1, Wanted(generators=0, microbatch_tokens=8192, rank=RANK)
    while True:
        try:
            plan([model], Device("GPU", gpu_bytes, ranks), wanted)
            return ranks
        except DoesNotFit:
            if ranks >= _MOST:
                raise
            ranks *= 2


def _gpus(model: Check, gpu_bytes: int, slots: int) -> int:
    """Of our engine, which takes one GPU, or of vLLM."""
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
