"""Models with random weights that benches compute with: of any shape, and the toy, a small mixture of experts which a
pass keeps busy, as the built-in one of 160 thousand parameters is not.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.parts.peers import transformers_model
from workers.model.base.weights import places
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.tiny import TINY_PATH

CONFIG = DecoderConfig(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=1024,
    hidden_size=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=512,
    context_length=4096,
    num_experts=16,
    experts_per_token=4,
    moe_intermediate_size=128,
    norm_topk=True,
)


def random_decoder(
    config: DecoderConfig = CONFIG, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Weights drawn on the device, from a fixed seed. Embeddings have unit size, so that tokens choose different
    experts."""
    decoder, generator = Decoder(config, dtype, device), torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                std = 1.0 if name == "embed" else 0.05 if "router" in name else 0.02
                weight.normal_(0.0, std, generator=generator)
    return decoder


def save_toy(folder: Path, config: DecoderConfig = CONFIG) -> Path:
    """Save the toy as a folder that a server can serve, with the tokenizer of the built-in model."""
    transformers_model(config).save_pretrained(folder)  # for its config.json
    tensors = {name: place.target.clone() for name, place in places(random_decoder(config))}
    save_file(tensors, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_PATH / name, folder)
    return folder
