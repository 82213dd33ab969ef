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
from torch import Tensor, nn

from workers.model.card import weight_files
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.families.read import read_config
from workers.model.families.table import FAMILIES

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
    config = decoder.config
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    beyond = range(config.num_layers, config.num_layers + config.prediction_layers)
    unused = tuple(f"model.layers.{layer}." for layer in beyond)
    filled: set[str] = set()
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                if name in ignored or name.startswith(unused) or name.endswith(IGNORED_SUFFIXES):
                    continue
                names, place = fused.get(name) or ([name], places.get(name))
                if place is None or not filled.isdisjoint(names):
                    raise ModelWeightsError(f"{file}: tensor {name} has no place in a {config.architecture}")
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
        yield from _attention_places(at + "self_attn.", layer, c)
        if c.is_moe(i):
            yield from _mixture_places(at, layer, c)
        else:
            yield from _mlp_places(at + "mlp.", _param(layer, "mlp.gate_up"), _param(layer, "mlp.down"))


def _attention_places(at: str, layer: nn.Module, c: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    yield from _by_head(at, "weight", _param(layer, "attn.qkv"), c)
    yield at + "o_proj.weight", _param(layer, "attn.o")
    if c.qkv_bias:
        yield from _by_head(at, "bias", _param(layer, "attn.qkv_bias"), c)
    if c.o_bias:
        yield at + "o_proj.bias", _param(layer, "attn.o_bias")
    if c.qk_norm:
        yield at + "q_norm.weight", _param(layer, "attn.q_norm")
        yield at + "k_norm.weight", _param(layer, "attn.k_norm")
    if c.sinks:
        yield at + "sinks", _param(layer, "attn.sinks")


def _by_head(at: str, kind: str, qkv: Tensor, c: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    for name, part in zip("qkv", torch.split(qkv, [c.q_size, c.kv_size, c.kv_size]), strict=True):
        yield f"{at}{name}_proj.{kind}", part


def _mixture_places(at: str, layer: nn.Module, c: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    layout = FAMILIES[c.architecture].layout
    at = f"{at}{layout.mixture}."
    yield f"{at}{layout.router}.weight", _param(layer, "mlp.router.weight")
    if c.router.bias:
        yield f"{at}{layout.router}.bias", _param(layer, "mlp.router.bias")
    if c.router.correction:
        yield f"{at}{layout.router}.e_score_correction_bias", _param(layer, "mlp.router.correction")
    for expert in range(c.num_experts):
        gate_up, down = _param(layer, "mlp.gate_up")[expert], _param(layer, "mlp.down")[expert]
        yield from _mlp_places(f"{at}experts.{expert}.", gate_up, down, layout.expert)
    if c.shared_intermediate_size:
        gate_up, down = _param(layer, "mlp.shared.gate_up"), _param(layer, "mlp.shared.down")
        yield from _mlp_places(f"{at}shared_experts.", gate_up, down)


def _mlp_places(
    at: str, gate_up: Tensor, down: Tensor, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[tuple[str, Tensor]]:
    for name, part in zip(names, (*gate_up.chunk(2), down), strict=True):
        yield f"{at}{name}.weight", part


def _fused_places(decoder: Decoder) -> Iterator[tuple[str, tuple[list[str], Tensor]]]:
    """Fused checkpoint name -> the per-expert names it stands for, and the parameter it fills."""
    c = decoder.config
    layout = FAMILIES[c.architecture].layout
    gate, up, down = layout.expert
    for i in filter(c.is_moe, range(c.num_layers)):
        at, layer = f"model.layers.{i}.{layout.mixture}.experts.", decoder.layers[i]
        gates = [f"{at}{e}.{part}.weight" for e in range(c.num_experts) for part in (gate, up)]
        yield at + "gate_up_proj", (gates, _param(layer, "mlp.gate_up"))
        downs = [f"{at}{e}.{down}.weight" for e in range(c.num_experts)]
        yield at + "down_proj", (downs, _param(layer, "mlp.down"))


def _param(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(name)
