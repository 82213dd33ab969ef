"""A decoder from a Hugging Face model folder: its safetensors, tensor by tensor, in any order of shards.

Every tensor of the decoder must be found once, and every tensor found must belong to it: a checkpoint that almost fits
is refused by name instead of served wrong. Experts may be stored one by one (what save_pretrained writes) or
fused over experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from workers.model.card import weight_files
from workers.model.config import read_config
from workers.model.decoder import Decoder

#: Tensors that some checkpoints carry and the decoder computes from its config.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


class ModelWeightsError(ValueError):
    """The safetensors files do not hold exactly the tensors of the decoder."""


def load_decoder(path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """The decoder of a Hugging Face model folder. Raises UnsupportedModel or ModelWeightsError by name."""
    folder = Path(path)
    config = read_config(folder.name, folder)
    decoder = Decoder(config, dtype, device)
    copy_weights(decoder, weight_files(folder.name, folder))
    return decoder


@torch.no_grad()
def copy_weights(decoder: Decoder, files: Sequence[Path]) -> None:
    """Fill every parameter of `decoder` from `files`, converting to its dtype. Raises ModelWeightsError."""
    places = dict(_places(decoder))
    fused = dict(_fused_places(decoder))
    ignored = {"lm_head.weight"} if decoder.config.tie_embeddings else set()
    filled: set[str] = set()
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                if name in ignored or name.endswith(IGNORED_SUFFIXES):
                    continue
                names, place = fused.get(name) or ([name], places.get(name))
                if place is None or not filled.isdisjoint(names):
                    raise ModelWeightsError(f"{file}: tensor {name} has no place in a {decoder.config.architecture}")
                _copy(file, name, handle.get_tensor(name), place)
                filled.update(names)
    missing = sorted(places.keys() - filled)
    if missing:
        raise ModelWeightsError(f"{files[0].parent}: {len(missing)} tensors are missing, first {missing[:3]}")


def _copy(file: Path, name: str, tensor: Tensor, place: Tensor) -> None:
    if tensor.shape != place.shape or not tensor.is_floating_point():
        got, need = f"{tensor.dtype} {list(tensor.shape)}", f"floating point {list(place.shape)}"
        raise ModelWeightsError(f"{file}: tensor {name} is {got}, the config needs {need}")
    place.copy_(tensor)


def _places(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint name -> the (part of a) parameter it fills."""
    c = decoder.config
    yield "model.embed_tokens.weight", decoder.embed
    yield "model.norm.weight", decoder.norm
    if not c.tie_embeddings:
        yield "lm_head.weight", decoder.head
    for i in range(c.num_layers):
        at, layer = f"model.layers.{i}.", decoder.layers[i]
        yield at + "input_layernorm.weight", _param(layer, "attn_norm")
        yield at + "post_attention_layernorm.weight", _param(layer, "mlp_norm")
        q, k, v = torch.split(_param(layer, "attn.qkv"), [c.q_size, c.kv_size, c.kv_size])
        yield at + "self_attn.q_proj.weight", q
        yield at + "self_attn.k_proj.weight", k
        yield at + "self_attn.v_proj.weight", v
        yield at + "self_attn.o_proj.weight", _param(layer, "attn.o")
        if c.qk_norm:
            yield at + "self_attn.q_norm.weight", _param(layer, "attn.q_norm")
            yield at + "self_attn.k_norm.weight", _param(layer, "attn.k_norm")
        gate_up, down = _param(layer, "mlp.gate_up"), _param(layer, "mlp.down")
        if not c.is_moe(i):
            yield from _mlp_places(at + "mlp.", gate_up, down)
            continue
        yield at + "mlp.gate.weight", _param(layer, "mlp.router")
        for expert in range(c.num_experts):
            yield from _mlp_places(f"{at}mlp.experts.{expert}.", gate_up[expert], down[expert])


def _mlp_places(at: str, gate_up: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
    gate, up = gate_up.chunk(2)
    yield at + "gate_proj.weight", gate
    yield at + "up_proj.weight", up
    yield at + "down_proj.weight", down


def _fused_places(decoder: Decoder) -> Iterator[tuple[str, tuple[list[str], Tensor]]]:
    """Fused checkpoint name -> the per-expert names it stands for, and the parameter it fills."""
    c = decoder.config
    for i in filter(c.is_moe, range(c.num_layers)):
        at, layer = f"model.layers.{i}.mlp.experts.", decoder.layers[i]
        gates = [f"{at}{e}.{part}_proj.weight" for e in range(c.num_experts) for part in ("gate", "up")]
        yield at + "gate_up_proj", (gates, _param(layer, "mlp.gate_up"))
        downs = [f"{at}{e}.down_proj.weight" for e in range(c.num_experts)]
        yield at + "down_proj", (downs, _param(layer, "mlp.down"))


def _param(module: torch.nn.Module, name: str) -> Tensor:
    return module.get_parameter(name)
