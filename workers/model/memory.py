"""What a forward keeps for its backward, and whether that fits the memory at hand.

Three ways, none of which changes a bit of the result: keep everything; keep the input of each layer and compute the
layer again in the backward (a third more work); and, on a device, keep those inputs in the host's memory.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import torch

from workers.model.config import DecoderConfig

#: Share of the free memory that activations may fill; gradients, logits and other work need the rest.
SHARE = 0.5

#: Up to this size the free memory is not looked up.
ALWAYS_FITS_BYTES = 128 << 20


class Saving(Enum):
    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


def choose_saving(config: DecoderConfig, tokens: int, device: torch.device, budget_bytes: int | None = None) -> Saving:
    """How to run a forward of `tokens` tokens; `budget_bytes` replaces the share of the free memory."""
    kept = tokens * config.num_layers * kept_bytes(config)
    if budget_bytes is None:
        if kept <= ALWAYS_FITS_BYTES:
            return Saving.KEEP
        budget_bytes = int(SHARE * free_bytes(device))
    if kept <= budget_bytes:
        return Saving.KEEP
    inputs = tokens * config.num_layers * config.hidden_size * 4
    return Saving.RECOMPUTE if inputs <= budget_bytes or device.type == "cpu" else Saving.OFFLOAD


def kept_bytes(config: DecoderConfig) -> int:
    """Bytes that autograd keeps of one token in one layer, approximately: inputs and outputs of norms and linears,
    queries, keys and values before and after norm and rotation, and the inside of the MLP; float32."""
    attention = 7 * config.q_size + 6 * config.kv_size + 3 * (config.query_size - config.q_size)
    if config.delta is not None:
        attention = max(attention, 12 * config.delta.mixed_size + 12 * config.delta.value_size)
    dense = 5 * config.intermediate_size
    experts = config.experts_per_token * (2 * config.moe_intermediate_size + 16) + 3 * config.num_experts
    experts += 5 * config.shared_intermediate_size
    return 4 * (6 * config.hidden_size + attention + (experts if config.num_experts else dense))


def free_bytes(device: torch.device) -> int:
    """Memory that can be allocated now."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = _meminfo_bytes()
    try:
        # In a container the cgroup's limit applies as well.
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, free)


def _meminfo_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62  # not Linux: nothing is known, so nothing is recomputed
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 1 << 62)
