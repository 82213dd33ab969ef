"""Loads a decoder in which every process owns an equal share of the experts, and has the rest whole.

The rest of a large mixture is small (Qwen3-235B-A22B: 7.9 of 235 billion parameters), so that none of the base ever
travels.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from workers.model.base.sharded import Part, copy_parts
from workers.model.card import weight_files
from workers.model.config import DecoderConfig, UnsupportedModel
from workers.model.decoder import Decoder, rotary_of
from workers.model.families.read import read_config
from workers.model.mixture.mixture import Mixture
from workers.model.owned.exchange import Exchange
from workers.model.owned.layer import OfLayer
from workers.model.owned.owner import Owner
from workers.model.planning.check import unequal

#: Parameters of a mixture that have a row for each expert; a process has only its own experts' rows.
_OF_EXPERTS = ("gate_up", "down", "gate_up_bias")


class Owned:
    """This process's part of a decoder, and the exchange between the parts."""

    def __init__(self, decoder: Decoder, exchange: Exchange) -> None:
        self.decoder, self._exchange = decoder, exchange

    def finish(self, trains: bool) -> None:
        """End a step: take part in the rest of it for the other processes, with nothing to compute here."""
        self._exchange.finish(trains)


def load_owned(
    path: str | Path, dtype: torch.dtype, device: torch.device, control: dist.ProcessGroup | None = None
) -> Owned:
    """The model in a folder, with this process's share of the experts. `control`: a process group for the CPU, if the
    default group is not for it. Raises UnsupportedModel or ModelWeightsError, naming the model."""
    folder, rank, ranks = Path(path), dist.get_rank(), dist.get_world_size()
    config = read_config(folder.name, folder)
    if problem := unequal(config, ranks):
        raise UnsupportedModel(folder.name, folder, problem, 'trainer.shard = "all"')
    each = config.num_experts // ranks
    decoder = empty(config, dtype, device, each)
    of_experts = {name for name, _ in decoder.named_parameters() if is_of_experts(decoder, name)}

    def part(name: str, rows: int) -> Part:
        first, last = (rank * each, (rank + 1) * each) if name in of_experts else (0, rows)
        return Part(decoder.get_parameter(name), first, last)

    copy_parts(decoder, weight_files(folder.name, folder), part)
    mixtures = {layer: cast(Mixture, decoder.layers[layer].mlp) for layer in config.mixture_layers}
    owners = {layer: Owner(mixture.experts(), mixture.names) for layer, mixture in mixtures.items()}
    exchange = Exchange(config, owners, control)
    for layer, mixture in mixtures.items():
        mixture.away = OfLayer(exchange, layer, config.num_experts, len(mixture.names.inner_b))
    decoder.begin_step = exchange.begin
    return Owned(decoder, exchange)


def empty(config: DecoderConfig, dtype: torch.dtype, device: torch.device, each: int) -> Decoder:
    """A decoder with `each` experts in each mixture and uninitialised weights."""
    decoder = Decoder(config, dtype, "meta")
    with torch.device(device):
        decoder.rotary = rotary_of(config)
        for name, like in list(decoder.named_parameters()):
            shape = (each, *like.shape[1:]) if is_of_experts(decoder, name) else like.shape
            module, _, last = name.rpartition(".")
            own = nn.Parameter(torch.empty(shape, dtype=like.dtype), requires_grad=False)
            setattr(decoder.get_submodule(module), last, own)
    if config.tie_embeddings:
        decoder.head = decoder.embed
    return decoder


def is_of_experts(decoder: Decoder, name: str) -> bool:
    """True if the parameter has a row for each expert."""
    module, _, last = name.rpartition(".")
    return last in _OF_EXPERTS and isinstance(decoder.get_submodule(module), Mixture)
