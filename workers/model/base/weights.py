"""A decoder from a Hugging Face model folder: its safetensors, tensor by tensor, in any order of shards.

Every tensor of the decoder must be found once, and every tensor found must belong to it: a checkpoint that almost fits
is refused by name instead of served wrong. Experts may be stored one by one (what save_pretrained writes) or
fused over experts; quantised weights become bfloat16 (stored.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from workers.model.base.stored import Stored
from workers.model.card import weight_files
from workers.model.config import DecoderConfig, LatentConfig
from workers.model.decoder import Decoder
from workers.model.families.read import read_config
from workers.model.families.table import FAMILIES, plain_name

#: Tensors that some checkpoints carry and the decoder computes from its config.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
#: How many rows of head and embedding are compared at a time.
TIED_ROWS = 4096


class ModelWeightsError(ValueError):
    """The safetensors files do not hold exactly the tensors of the decoder."""


def load_decoder(path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """The decoder of a Hugging Face model folder. Raises UnsupportedModel or ModelWeightsError by name."""
    folder = Path(path)
    config = read_config(folder.name, folder)
    decoder = Decoder(config, dtype, device)
    copy_weights(decoder, weight_files(folder.name, folder))
    return decoder


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _centred(weight: Tensor) -> Tensor:
    """The factors of a norm that is stored as its difference from one."""
    return weight.float() + 1.0


@dataclass(frozen=True)
class Place:
    """The (part of a) parameter that a stored tensor fills, and how the tensor is arranged for it."""

    target: Tensor
    arranged: Callable[[Tensor], Tensor] = _as_it_is

    def fits(self, shape: Sequence[int]) -> bool:
        """True if a tensor of this shape, once it is arranged, has the shape of the place."""
        try:
            return self.arranged(torch.empty(tuple(shape), device="meta")).shape == self.target.shape
        except (IndexError, RuntimeError):  # it lacks dimensions that the arrangement needs
            return False


@torch.no_grad()
def copy_weights(decoder: Decoder, files: Sequence[Path]) -> None:
    """Fill every parameter of `decoder` from `files`, converting to its dtype. Raises ModelWeightsError; a tensor that
    is missing or has no place is found before anything is read."""
    with reading(files) as stored:
        for name, place in matched(decoder, stored, files[0].parent):
            _copy(stored, name, place)


@contextmanager
def reading(files: Sequence[Path]) -> Iterator[Stored]:
    """The tensors in `files`. What is wrong with them is a ModelWeightsError."""
    try:
        yield Stored(files)
    except KeyError as error:
        raise ModelWeightsError(f"{files[0].parent}: tensor {error.args[0]} is missing") from None
    except ValueError as error:
        raise error if isinstance(error, ModelWeightsError) else ModelWeightsError(str(error)) from None


def does_not_fit(stored: Stored, name: str, found: object, place: Place) -> ModelWeightsError:
    """The error for a stored tensor that does not fit its place."""
    need = f"floating point {list(place.target.shape)}"
    return ModelWeightsError(f"{stored.file(name)}: tensor {name} is {found}, the config needs {need}")


def matched(decoder: Decoder, stored: Stored, folder: Path) -> list[tuple[str, Place]]:
    """Each stored tensor that the decoder uses, and the place that it fills."""
    config, single, fused = decoder.config, dict(places(decoder)), dict(_fused_places(decoder))
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    beyond = range(config.num_layers, config.num_layers + config.prediction_layers)
    layout = FAMILIES[config.architecture].layout
    unused = (*(f"model.layers.{layer}." for layer in beyond), *layout.unused)
    filled: set[str] = set()
    matched = []
    for name in stored.names():
        known = plain_name(name)
        if known in ignored or known.startswith(unused) or known.endswith(IGNORED_SUFFIXES):
            continue
        names, place = fused.get(known) or ([known], single.get(known))
        if place is None or not filled.isdisjoint(names):
            raise ModelWeightsError(f"{stored.file(name)}: tensor {name} has no place in a {config.architecture}")
        matched.append((name, place))
        filled.update(names)
    missing = sorted(single.keys() - filled)
    if missing:
        raise ModelWeightsError(f"{folder}: {len(missing)} tensors are missing, first {missing[:3]}")
    if config.tie_embeddings:
        _check_tied(decoder, stored, {plain_name(name): name for name in stored.names()})
    return matched


def _check_tied(decoder: Decoder, stored: Stored, names: Mapping[str, str]) -> None:
    """Raise if a head of its own, which some tools leave in spite of `tie_word_embeddings`, differs from the embedding:
    libraries differ in which of the two they use."""
    head = names.get("lm_head.weight")
    if head is None:
        return
    embedding = names[f"model.{FAMILIES[decoder.config.architecture].layout.embedding}.weight"]
    size = decoder.config.vocab_size
    same = stored.shape(head) == stored.shape(embedding) and all(
        torch.equal(stored.rows(head, at, at + TIED_ROWS), stored.rows(embedding, at, at + TIED_ROWS))
        for at in range(0, size, TIED_ROWS)
    )
    if not same:
        raise ModelWeightsError(
            f"{stored.file(head)}: tensor {head} is not {embedding}, but config.json has tie_word_embeddings=true: "
            f"set it to false to use this head, or remove the tensor"
        )


def _copy(stored: Stored, name: str, place: Place) -> None:
    tensor = stored.read(name)
    if not tensor.is_floating_point() or not place.fits(tensor.shape):
        raise does_not_fit(stored, name, f"{tensor.dtype} {list(tensor.shape)}", place)
    place.target.copy_(place.arranged(tensor))


def places(decoder: Decoder) -> Iterator[tuple[str, Place]]:
    """For each tensor, its name in the checkpoint, and the (part of a) parameter that it fills."""
    c, layout = decoder.config, FAMILIES[decoder.config.architecture].layout
    norm = _centred if layout.centred_norms else _as_it_is
    yield f"model.{layout.embedding}.weight", Place(decoder.embed)
    yield f"model.{layout.last_norm}.weight", Place(decoder.norm, norm)
    if not c.tie_embeddings:
        yield "lm_head.weight", Place(decoder.head)
    for i in range(c.num_layers):
        at, layer = f"model.layers.{i}.", decoder.layers[i]
        if c.has_attention(i):
            yield f"{at}{layout.layer_norms[0]}.weight", Place(_param(layer, "attn_norm"), norm)
            if i in c.recurrent_layers:
                yield from _recurrence_places(f"{at}{layout.recurrence}.", layer, c)
            else:
                yield from _attention_places(f"{at}{layout.attention}.", layer, c, norm)
        if c.has_mlp(i):
            yield f"{at}{layout.layer_norms[1]}.weight", Place(_param(layer, "mlp_norm"), norm)
            if c.is_moe(i):
                yield from _mixture_places(at, layer, c)
            else:
                yield from _mlp_places(f"{at}{layout.mlp}.", layer, "mlp", layout.expert)


def _recurrence_places(at: str, layer: nn.Module, c: DecoderConfig) -> Iterator[tuple[str, Place]]:
    if c.delta is not None:
        parts = torch.split(_param(layer, "attn.inputs"), list(c.delta.projections.values()))
        for name, part in zip(c.delta.projections, parts, strict=True):
            yield f"{at}in_proj_{name}.weight", Place(part)
        yield at + "dt_bias", Place(_param(layer, "attn.decay_bias"))
    else:
        yield at + "in_proj.weight", Place(_param(layer, "attn.inputs"))
        yield at + "conv1d.bias", Place(_param(layer, "attn.conv_bias"))
        yield at + "dt_bias", Place(_param(layer, "attn.step_bias"))
        yield at + "D", Place(_param(layer, "attn.skip"))
    yield at + "conv1d.weight", Place(_param(layer, "attn.conv"), lambda tensor: tensor.squeeze(1))
    yield at + "A_log", Place(_param(layer, "attn.decay_log"))
    yield at + "norm.weight", Place(_param(layer, "attn.norm"))
    yield at + "out_proj.weight", Place(_param(layer, "attn.out"))


def _attention_places(
    at: str, layer: nn.Module, c: DecoderConfig, norm: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Place]]:
    if c.latent:
        yield from _latent_places(at, layer, c.latent)
        return
    layout = FAMILIES[c.architecture].layout
    if layout.qkv:
        yield f"{at}{layout.qkv}.weight", Place(_param(layer, "attn.qkv"))
    else:
        yield from _by_head(at, "weight", _param(layer, "attn.qkv"), c)
    yield f"{at}{layout.output}.weight", Place(_param(layer, "attn.o"))
    if c.qkv_bias:
        yield from _by_head(at, "bias", _param(layer, "attn.qkv_bias"), c)
    if c.o_bias:
        yield at + "o_proj.bias", Place(_param(layer, "attn.o_bias"))
    if c.qk_norm:
        for name, own in zip(layout.norms, ("q_norm", "k_norm"), strict=True):
            yield f"{at}{name}.weight", Place(_param(layer, f"attn.{own}"), norm)
    if c.sinks:
        yield at + "sinks", Place(_param(layer, "attn.sinks"))


def _latent_places(at: str, layer: nn.Module, c: LatentConfig) -> Iterator[tuple[str, Place]]:
    down = _param(layer, "attn.down")
    queries, keys = torch.split(down, [len(down) - c.kept, c.kept])
    yield at + ("q_a_proj.weight" if c.q_rank else "q_proj.weight"), Place(queries)
    yield at + "kv_a_proj_with_mqa.weight", Place(keys)
    if c.q_rank:
        yield at + "q_a_layernorm.weight", Place(_param(layer, "attn.q_norm"))
        yield at + "q_b_proj.weight", Place(_param(layer, "attn.q_up"))
    yield at + "kv_a_layernorm.weight", Place(_param(layer, "attn.kv_norm"))
    yield at + "kv_b_proj.weight", Place(_param(layer, "attn.kv_up"))
    yield at + "o_proj.weight", Place(_param(layer, "attn.o"))


def _by_head(at: str, kind: str, qkv: Tensor, c: DecoderConfig) -> Iterator[tuple[str, Place]]:
    for name, part in zip("qkv", torch.split(qkv, [c.query_size, c.kv_size, c.kv_size]), strict=True):
        yield f"{at}{name}_proj.{kind}", Place(part)


def _mixture_places(at: str, layer: nn.Module, c: DecoderConfig) -> Iterator[tuple[str, Place]]:
    layout = FAMILIES[c.architecture].layout
    at = f"{at}{layout.mixture}."
    yield f"{at}{layout.router}.weight", Place(_param(layer, "mlp.router.weight"))
    if c.router.bias:
        yield f"{at}{layout.router}.bias", Place(_param(layer, "mlp.router.bias"))
    if c.router.correction:
        yield f"{at}{layout.router}.{layout.correction}", Place(_param(layer, "mlp.router.correction"))
    if layout.interleaved:
        yield from _interleaved_places(f"{at}experts.", layer)
        return
    for expert in range(c.num_experts):
        yield from _mlp_places(f"{at}experts.{expert}.", layer, "mlp", layout.expert, expert)
    if c.expert_latent:
        yield at + "fc1_latent_proj.weight", Place(_param(layer, "mlp.latent_in"))
        yield at + "fc2_latent_proj.weight", Place(_param(layer, "mlp.latent_out"))
    if c.shared_intermediate_size:
        yield from _mlp_places(f"{at}shared_expert{'' if c.shared_gate else 's'}.", layer, "mlp.shared", layout.expert)
    if c.shared_gate:
        yield (
            f"{at}shared_expert_gate.weight",
            Place(_param(layer, "mlp.shared_gate"), lambda tensor: tensor.squeeze(0)),
        )


def _interleaved_places(at: str, layer: nn.Module) -> Iterator[tuple[str, Place]]:
    """Fused experts [E, in, out], the columns of gate and up alternating."""

    def parted(tensor: Tensor) -> Tensor:
        return torch.cat((tensor[..., ::2], tensor[..., 1::2]), dim=-1)

    yield at + "gate_up_proj", Place(_param(layer, "mlp.gate_up"), lambda tensor: parted(tensor).transpose(1, 2))
    yield at + "gate_up_proj_bias", Place(_param(layer, "mlp.gate_up_bias"), parted)
    yield at + "down_proj", Place(_param(layer, "mlp.down"), lambda tensor: tensor.transpose(1, 2))
    yield at + "down_proj_bias", Place(_param(layer, "mlp.down_bias"))


def _mlp_places(
    at: str, layer: nn.Module, mlp: str, names: tuple[str, ...], expert: int | None = None
) -> Iterator[tuple[str, Place]]:
    """Places of an MLP. `names`: those of gate (if there is one), up and down."""
    both = (_param(layer, f"{mlp}.{product}") for product in ("gate_up", "down"))
    gate_up, down = both if expert is None else (product[expert] for product in both)
    for name, part in zip(names, (*gate_up.chunk(len(names) - 1), down), strict=True):
        yield f"{at}{name}.weight", Place(part)


def _fused_places(decoder: Decoder) -> Iterator[tuple[str, tuple[list[str], Place]]]:
    """Fused checkpoint name -> the per-expert names it stands for, and the parameter it fills."""
    c = decoder.config
    layout = FAMILIES[c.architecture].layout
    *inner, down = layout.expert
    if layout.interleaved:
        return
    for i in filter(c.is_moe, range(c.num_layers)):
        at, layer = f"model.layers.{i}.{layout.mixture}.experts.", decoder.layers[i]
        gates = [f"{at}{e}.{part}.weight" for e in range(c.num_experts) for part in inner]
        yield f"{at}{'_'.join(c.gate.parts)}_proj", (gates, Place(_param(layer, "mlp.gate_up")))
        downs = [f"{at}{e}.{down}.weight" for e in range(c.num_experts)]
        yield at + "down_proj", (downs, Place(_param(layer, "mlp.down")))


def _param(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(name)
