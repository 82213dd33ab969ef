"""A decoder of which every process of a group holds a part: FSDP2 over the frozen base.

Each layer is a unit, and what is left (embedding, last norm, head) is one more. A unit is gathered when it is needed
and given up after it, and a process reads only the rows of the safetensors files that it keeps. So no process ever
holds the whole model: it has its share, and one or two layers while it computes.

Invariant: a forward gathers the root and then the layers in their order, a backward the layers in reverse, without the
last two, which are still there (as many as while one computes and the next is on its way). Every process of the group
must take part in each of these, whether or not it has anything to compute (`Sharded.finish`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from workers.model.attend import PackedAttend
from workers.model.base.stored import Stored
from workers.model.base.weights import Place, does_not_fit, matched, reading
from workers.model.card import weight_files
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder, rotary_of
from workers.model.families.read import read_config

#: The tag of gathered data on a CPU; other messages between ranks have 0.
_TAG = 1
#: How many layers a forward leaves gathered for its backward.
_KEPT = 2


class Sharded:
    """This process's part of a decoder, and how far a step has come with gathering it."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._root, *self._layers = units(decoder)
        self._gathers = _Counted()
        for unit in (self._root, *self._layers):
            unit.set_custom_all_gather(self._gathers)
        for layer in self._layers[-_KEPT:]:
            layer.set_reshard_after_forward(False)
        if decoder.device.type == "cpu":  # on a GPU, streams gather the next layer while one computes
            self._root._set_unshard_async_op(True)
            for unit, following in pairwise((self._root, *self._layers)):
                unit.set_modules_to_forward_prefetch([following])

    def finish(self, trains: bool) -> None:
        """End a step: take part in what the others still gather of it, with nothing to compute, and give up whatever
        is gathered. So a process joins in that has nothing to do, or whose own work has failed half way."""
        order = [self._root, *self._layers, *(reversed(self._layers[:-_KEPT]) if trains else ())]
        done = self._gathers.count
        if done > len(order):
            raise RuntimeError(f"this process gathered {done} units in a step that has {len(order)}")
        _reset(self._root)
        for unit in order[done:]:
            unit.unshard()
            unit.reshard()
        self._gathers.count = 0


def _reset(root: FSDPModule) -> None:
    """End an iteration that may have stopped anywhere: `reset_iter_state`, which torch 2.11 does not have; there, what
    that does for parameters without gradients."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state: Any = root._get_fsdp_state()
    stream, comm, context = state._device_handle.current_stream(), state._comm_ctx, state._state_ctx
    if comm.all_gather_state is not None:
        stream.wait_event(comm.all_gather_state.event)
        comm.all_gather_state = None
    comm.post_forward_order.clear()
    for each in context.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        if (group := each._fsdp_param_group) is None:
            continue
        if (gathered := group._all_gather_result) is not None:
            if gathered.all_gather_event is not None:
                stream.wait_event(gathered.all_gather_event)
            if isinstance(gathered.all_gather_work, dist.Work):
                gathered.all_gather_work.wait()
            group._all_gather_result = None
        if (event := group._reshard_after_forward_event) is not None:
            group._wait_all_gather_streams_on_event(event)
            group._reshard_after_forward_event = None
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


class _Exchange(dist.Work):
    """A gathering under way."""

    def __init__(self, whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        parts, ranks = whole.chunk(group.size()), range(group.size())
        others = [rank for rank in ranks if rank != group.rank()]
        # Sends come first: gloo's thread holds what a send needs while it reads what has arrived.
        going = [dist.isend(own, group=group, group_dst=rank, tag=_TAG) for rank in others]
        coming = [dist.irecv(parts[rank], group=group, group_src=rank, tag=_TAG) for rank in others]
        self._works = [work for work in (*going, *coming) if work is not None]

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return all([work.wait() for work in self._works])


class _Counted(DefaultAllGather):
    """FSDP2's all-gather, which counts. On a CPU each sends its part to each: gloo's own gathers into a copy."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.count += 1
        if output_tensor.device.type != "cpu":
            work: dist.Work | None = super().__call__(output_tensor, input_tensor, group, async_op)
            return work
        sent = _Exchange(output_tensor, input_tensor, group)
        if async_op:
            return sent
        sent.wait()
        return None


def load_sharded(path: str | Path, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh) -> Sharded:
    """This process's part of the model in a folder. The last dimension of `mesh` shards, one before it replicates.
    Raises UnsupportedModel or ModelWeightsError by name. All processes of the mesh must call it."""
    folder = Path(path)
    config = read_config(folder.name, folder)
    decoder = empty(config, dtype, device, mesh)
    copy_shards(decoder, weight_files(folder.name, folder), mesh)
    with torch.no_grad():  # the first forward sets up what later ones use
        decoder(*torch.zeros(2, 1, dtype=torch.long, device=device), PackedAttend([1]))
    sharded = Sharded(decoder)
    sharded.finish(trains=True)
    return sharded


def empty(config: DecoderConfig, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh) -> Decoder:
    """A decoder for weights to be copied into. One unit at a time is whole, and is not written."""
    decoder = Decoder(config, dtype, "meta")
    with torch.device(device):
        decoder.rotary = rotary_of(config)
    for layer in decoder.layers:
        layer.to_empty(device=device)
        fully_shard(layer, mesh=mesh)
    for name in ("embed", "norm", "head"):
        if name != "head" or not config.tie_embeddings:
            like = decoder.get_parameter(name)
            setattr(decoder, name, nn.Parameter(torch.empty_like(like, device=device), requires_grad=False))
    if config.tie_embeddings:
        decoder.head = decoder.embed
    fully_shard(decoder, mesh=mesh, reshard_after_forward=False)
    return decoder


@torch.no_grad()
def copy_shards(decoder: Decoder, files: Sequence[Path], mesh: DeviceMesh) -> None:
    """Fill this process's part of every parameter, reading no more than that. Raises ModelWeightsError."""

    def part(name: str, rows: int) -> Part:
        sharded = cast(DTensor, decoder.get_parameter(name))
        return Part(sharded.to_local(), *rows_of(rows, mesh.get_local_rank(-1), mesh.size(-1)))

    copy_parts(decoder, files, part)


class Part(NamedTuple):
    """The rows first:last of a parameter, which are this process's."""

    mine: Tensor
    first: int
    last: int


@torch.no_grad()
def copy_parts(decoder: Decoder, files: Sequence[Path], part_of: Callable[[str, int], Part]) -> None:
    """Fill the parts of the parameters, by the name and the rows of each, reading no more than these. Raises
    ModelWeightsError."""
    whole = Decoder(decoder.config, decoder.dtype, "meta")
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    with reading(files) as stored:
        for name, place in matched(whole, stored, files[0].parent):
            base = place.target._base if place.target._is_view() else place.target
            assert base is not None
            _copy(stored, name, place, base.stride(0), part_of(names[id(base)], len(base)))


def _copy(stored: Stored, name: str, place: Place, stride: int, part: Part) -> None:
    """Copy the rows of a stored tensor that this process keeps. `place` says where the tensor's rows go in a parameter,
    whose rows are `stride` apart. If it is arranged across rows it is read whole."""
    shape = stored.shape(name)
    if not place.fits(shape):
        raise does_not_fit(stored, name, list(shape), place)
    first, last = part.first * stride, part.last * stride
    start, row = place.target.storage_offset(), place.target.stride(0)
    begin = max(0, (first - start) // row)
    end = min(place.target.shape[0], (last - start) // row)
    if begin >= end:
        return
    as_it_is = place.arranged is Place.arranged
    # in a stack of experts each expert is arranged by itself
    by_rows = as_it_is or len(shape) == place.target.dim() == 3
    rows = stored.rows(name, begin, end) if by_rows else place.arranged(stored.read(name))[begin:end]
    if not rows.is_floating_point():
        raise does_not_fit(stored, name, f"{rows.dtype} {list(shape)}", place)
    at = start + begin * row - first
    target = part.mine.view(-1)[at : at + (end - begin) * row].view(end - begin, *place.target.shape[1:])
    target.copy_(place.arranged(rows) if by_rows and not as_it_is else rows)


def rows_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Which rows of a parameter a rank keeps (torch.chunk's rule, which is FSDP2's)."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def held_bytes(decoder: Decoder) -> int:
    """How many bytes of the base this process holds while nothing is gathered."""
    parameters = decoder.parameters()
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in parameters)


def units(decoder: Decoder) -> list[FSDPModule]:
    """The root and the layers, in the order in which a forward gathers them."""
    return [cast(FSDPModule, module) for module in (decoder, *decoder.layers)]
