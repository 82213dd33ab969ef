"""Experts owned by the processes of a group (ranks): pairs of a token and an expert travel to the expert's owner, and
back.

Everything else of a layer is computed where the token is, including the outer factors of its adapter; so of adapters
only scale * x A^T travels to the owner, and h A^T back. The inner factors of an adapter, a matrix for each expert, are
sent to the owners of the experts that its tokens chose. In the backward, each owner returns their gradients, summed per
group of rows, and the group's home adds them in the order of the groups.

Invariant (bits): results are those of one process. An owner has the rows of a group in the order that one process would
have, and no product depends on the rows of others.

Invariant (progress): a step is a sequence of collectives that all processes agree on at its beginning (`Step.order`):
each mixture layer forward and, if it trains, backward, with another forward before that if any process recomputes.
Every process takes part in all of it: one without pairs, or whose own work failed half way, goes on for the others
(`finish`).

Shapes: P pairs of this process in the order in which they travel, by owner and group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.config import DecoderConfig
from workers.model.lora.rows import LoraRows
from workers.model.memory import is_out_of_memory
from workers.model.owned.owner import AdapterPerGroup, Owner, PerGroup, Served
from workers.model.owned.travel import Travel

log = logging.getLogger(__name__)

#: The outcome of a layer on an owner.
FINE, NO_MEMORY, FAILED = range(3)
#: The adapter number of a group without inner factors.
NOBODY = -1


class OwnerFailed(RuntimeError):
    """Another process could not compute pairs (of a token and an expert) that this process sent."""


class Brought(NamedTuple):
    """What each process tells all others about its part of a step: whether it `recomputes`; the `ranks` of its adapters
    that have inner factors; and for each group of its rows, the number of the group's adapter among these (`adapters`),
    and whether it is `trained`."""

    recomputes: bool = False
    ranks: tuple[int, ...] = ()
    adapters: tuple[int, ...] = (NOBODY,)
    trained: tuple[bool, ...] = (False,)

    def used(self, counts: list[int]) -> list[int]:
        """The numbers of the adapters of groups that have pairs, ascending."""
        return sorted({index for index, count in zip(self.adapters, counts, strict=True) if count} - {NOBODY})

    def trained_ranks(self, counts: list[int]) -> list[int]:
        """For each group the rank of the group's adapter; 0 if the group is not trained or has no pairs."""
        groups = zip(self.adapters, self.trained, counts, strict=True)
        return [self.ranks[index] if trained and count and index != NOBODY else 0 for index, trained, count in groups]


@dataclass
class Step:
    """A step. `brought`: from each process. `adapters` and `grads`: this process's. `order`: the sequence of (layer,
    whether backward), of which `done` have begun. Forwards from number `first` on keep the pairs they served, for the
    backward. By layer: `sent`, the number of pairs sent to each owner, by group; `served`, the pairs computed here, by
    the processes that sent them, with what their backward needs."""

    brought: list[Brought]
    adapters: list[Adapter]
    grads: list[Adapter | None]
    order: list[tuple[int, bool]]
    first: int
    done: int = 0
    sent: dict[int, PerGroup] = field(default_factory=dict)
    served: dict[int, list[tuple[range, Served]]] = field(default_factory=dict)

    @property
    def recomputes(self) -> bool:
        return any(each.recomputes for each in self.brought)

    @property
    def max_rank(self) -> int:
        return max((rank for brought in self.brought for rank in brought.ranks), default=0)


class Exchange:
    """This process among the owners. `owners`: its own experts, by layer. `control`: the group for numbers on the
    CPU."""

    def __init__(
        self, config: DecoderConfig, owners: Mapping[int, Owner], control: dist.ProcessGroup | None = None
    ) -> None:
        self._config, self._owners = config, owners
        weight = next(iter(owners.values())).experts.gate_up_EGD
        self.each, self._dtype, self._device = len(weight), weight.dtype, weight.device
        self._travel = Travel(weight.device, control)
        self.ranks = self._travel.size
        self._shape = cache(self._shape_of)
        self._step: Step | None = None
        self._between = self._apart = False

    @property
    def step(self) -> Step:
        if self._step is None:
            raise RuntimeError("no step has begun")
        return self._step

    def begin(self, rows: LoraRows | None, recomputes: bool) -> bool:
        """Begin a step, at the same time as all processes; it trains if gradients are recorded. Returns whether any
        process recomputes, and so all must."""
        return self._begin(rows, recomputes, torch.is_grad_enabled()).recomputes

    def finish(self, trains: bool) -> None:
        """End a step: take part in the rest of it, without pairs of this process."""
        if self._between:
            raise RuntimeError("this process has left the others in the middle of a layer")
        with torch.no_grad():
            step = self._step or self._begin(None, False, trains)
            for layer, back in step.order[step.done :]:
                owner = self._owners[layer]
                stack, sent = len(owner.names.inner_b), step.sent.get(layer, [])
                pairs, width = (sum(map(sum, sent)), 1) if back else (0, stack)
                x_PD = torch.zeros(pairs, owner.experts.gate_up_EGD.shape[2], dtype=self._dtype, device=self._device)
                small = torch.zeros(pairs, width * step.max_rank + back, device=self._device)
                if back:
                    self._backward(layer, x_PD, small)
                else:
                    none = [[0] * len(step.brought[self._travel.rank].adapters) for _ in range(self.ranks)]
                    self._forward(layer, x_PD, small, torch.zeros(0, 1, dtype=torch.int64, device=self._device), none)
        self._step = None

    def forward(
        self, layer: int, x_PD: Tensor, u_P: Tensor, expert_P1: Tensor, counts: PerGroup
    ) -> tuple[Tensor, Tensor]:
        """y_PD in the weights' dtype, and v_P. `expert_P1`: the expert's number among those of its owner. `counts`: how
        many pairs go to each owner, by group. Raises OutOfMemoryError or OwnerFailed if an owner of these pairs
        failed."""
        (y_PD, v_P), states = self._forward(layer, x_PD, u_P, expert_P1, counts)
        _raise_for(states, counts)
        return y_PD, v_P

    def backward(self, layer: int, dout_PD: Tensor, dv_P: Tensor, weights_P1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dx_PD in the weights' dtype, du_P and dweights_P. Raises as `forward` does."""
        counts = self.step.sent[layer]
        (dx_PD, small), states = self._backward(layer, dout_PD, torch.cat((dv_P, weights_P1), dim=1))
        _raise_for(states, counts)
        return dx_PD, small[:, :-1].contiguous(), small[:, -1]

    def _begin(self, rows: LoraRows | None, recomputes: bool, trains: bool) -> Step:
        if self._step is not None:
            raise RuntimeError("a step is in progress")
        own, adapters = self._brings(rows, recomputes)
        brought = self._travel.objects(own)
        layers = list(self._owners)
        step = Step(brought, adapters, rows.grads if rows is not None else [None], [(i, False) for i in layers], 0)
        for layer in reversed(layers) if trains else ():
            step.order += [(layer, False), (layer, True)] if step.recomputes else [(layer, True)]
        step.first = 0 if trains and not step.recomputes else len(layers)
        self._step = step
        return step

    def _brings(self, rows: LoraRows | None, recomputes: bool) -> tuple[Brought, list[Adapter]]:
        """The message in which this process tells the others what it brings, and its adapters in the order of their
        numbers."""
        if rows is None:
            return Brought(recomputes), []
        down_a = next(iter(self._owners.values())).names.down_a
        of_group = [each if each is not None and down_a in each.stored else None for each in rows.adapters]
        found = list({id(each): each for each in of_group if each is not None}.values())
        numbers = {id(each): number for number, each in enumerate(found)}
        indices = tuple(NOBODY if each is None else numbers[id(each)] for each in of_group)
        trained = tuple(grad is not None for grad in rows.grads)
        return Brought(recomputes, tuple(each.rank for each in found), indices, trained), found

    def _forward(
        self, layer: int, x_PD: Tensor, u_P: Tensor, expert_P1: Tensor, counts: PerGroup
    ) -> tuple[list[Tensor], list[int]]:
        step = self._take_turn(layer, back=False)
        kept: list[tuple[range, Served]] = []
        with self._in_order():
            came = self._travel.counts(step.done, counts, [len(each.adapters) for each in step.brought])
            out, into = _totals(counts), _totals(came)
            pairs = self._travel.rows([x_PD, u_P, expert_P1], out, into)
            adapters = self._send_factors(step, layer, counts, came)

            def work(of: range) -> list[Tensor]:
                part = slice(of.start, of.stop)
                x_QD, u_Q, expert_Q1 = (_rows(each, into, of) for each in pairs)
                owner = self._owners[layer]
                served, found = owner.forward(came[part], adapters[part], x_QD, u_Q, expert_Q1, step.max_rank)
                kept.append((of, served))
                return found

            every = range(self.ranks)
            pieces = [range(process, process + 1) for process in every] if self._apart else [every]
            like = [x_PD[:0], u_P.new_empty(0, step.max_rank)]
            back, states = self._results(pieces, work, like, into, out)
        if step.done > step.first:
            step.served[layer] = kept
        step.sent[layer] = [[0] * len(of) if states[owner] else of for owner, of in enumerate(counts)]
        return back, states

    def _backward(self, layer: int, dout_PD: Tensor, small: Tensor) -> tuple[list[Tensor], list[int]]:
        step = self._take_turn(layer, back=True)
        kept, counts, owner = dict(step.served.pop(layer)), step.sent[layer], self._owners[layer]
        gradients: AdapterPerGroup = [[] for _ in range(self.ranks)]
        with self._in_order():
            came = [[0] * len(each.adapters) for each in step.brought]
            for of, served in kept.items():
                came[of.start : of.stop] = served.counts
            out, into = _totals(counts), _totals(came)
            pairs = self._travel.rows([dout_PD, small], out, into)

            def work(of: range) -> list[Tensor]:
                dout_QD, small_Q = (_rows(each, into, of) for each in pairs)
                own = [self._zeros(layer, step.brought[process].trained_ranks(came[process])) for process in of]
                found = owner.backward(kept[of], own, dout_QD, small_Q[:, :-1].contiguous(), small_Q[:, -1:])
                gradients[of.start : of.stop] = own
                return found

            like = [dout_PD[:0], small.new_empty(0, len(owner.names.inner_b) * step.max_rank + 1)]
            back, states = self._results(list(kept), work, like, into, out)
            self._return_gradients(step, layer, states, gradients)
        return back, states

    def _results(
        self,
        pieces: list[range],
        work: Callable[[range], list[Tensor]],
        like: list[Tensor],
        into: list[int],
        out: list[int],
    ) -> tuple[list[Tensor], list[int]]:
        """The owners' results for this process's pairs, without those of failed owners; and the outcome on each owner.
        This owner computes `pieces`, each the pairs of several processes. Once any owner has run out of memory, all
        compute the pairs of each process separately, so that no operation fails because of another process's pairs."""
        states, found = [FINE] * self.ranks, [like]
        for of in pieces:
            try:
                found.append(work(of))
            except Exception as error:
                states[of.start : of.stop] = [NO_MEMORY if is_out_of_memory(error) else FAILED] * len(of)
                if FAILED in states:
                    log.exception("the pairs of a layer could not be computed")
        short = int(NO_MEMORY in states)
        fared = self._travel.counts(self.step.done, [[state, short] for state in states], [2] * self.ranks)
        self._apart = self._apart or any(short for _, short in fared)
        into = [0 if states[process] else n for process, n in enumerate(into)]
        out = [0 if fared[owner][0] else n for owner, n in enumerate(out)]
        rows = [torch.cat(each) for each in zip(*found, strict=True)]
        return self._travel.rows(rows, into, out), [state for state, _ in fared]

    def _send_factors(self, step: Step, layer: int, counts: PerGroup, came: PerGroup) -> AdapterPerGroup:
        """Send each owner the inner factors of its own experts, for the adapters of groups that have pairs there.
        Returns the adapters received, for each process and group."""
        own = step.brought[self._travel.rank]
        out = []
        for owner, of in enumerate(counts):
            out.append([Adapter.zeros(self._shape(layer, own.ranks[i]), device=self._device) for i in own.used(of)])
            for index, part in zip(own.used(of), out[-1], strict=True):
                for name, tensor in part.stored.items():
                    tensor.copy_(self._owned(step.adapters[index].stored[name], owner))
        used = [brought.used(of) for brought, of in zip(step.brought, came, strict=True)]
        shapes = [
            [self._shape(layer, brought.ranks[index]) for index in each]
            for brought, each in zip(step.brought, used, strict=True)
        ]
        flat = self._travel.arenas(out, [sum(shape.numel for shape in each) for each in shapes])
        arenas = _arenas(flat, [shape for each in shapes for shape in each])
        found: AdapterPerGroup = []
        for brought, of, each in zip(step.brought, came, used, strict=True):
            here = {index: next(arenas) for index in each}
            found.append(
                [here.get(index) if count else None for index, count in zip(brought.adapters, of, strict=True)]
            )
        return found

    def _return_gradients(self, step: Step, layer: int, states: list[int], gradients: AdapterPerGroup) -> None:
        """Send gradients home, and add those that come back to the gradients of this process's groups, in the order of
        the groups."""
        own, counts = step.brought[self._travel.rank], step.sent[layer]
        ranks = [[] if states[owner] else own.trained_ranks(of) for owner, of in enumerate(counts)]
        sizes = [sum(self._shape(layer, rank).numel for rank in each if rank) for each in ranks]
        out = [[each for each in of if each is not None] for of in gradients]
        flat = self._travel.arenas(out, sizes)
        arenas = _arenas(flat, [self._shape(layer, rank) for each in ranks for rank in each if rank])
        for owner, each in enumerate(ranks):
            for group in (group for group, rank in enumerate(each) if rank):
                arena, grad = next(arenas), step.grads[group]
                assert grad is not None
                for name, tensor in arena.stored.items():
                    self._owned(grad.stored[name], owner).add_(tensor)

    def _zeros(self, layer: int, ranks: list[int]) -> list[Adapter | None]:
        """An arena for the gradient of each trained group, by rank; None for rank 0."""
        return [Adapter.zeros(self._shape(layer, r), device=self._device) if r else None for r in ranks]

    def _owned(self, tensor_E: Tensor, owner: int) -> Tensor:
        return tensor_E[owner * self.each : (owner + 1) * self.each]

    def _take_turn(self, layer: int, *, back: bool) -> Step:
        step = self.step
        if step.order[step.done : step.done + 1] != [(layer, back)]:
            raise RuntimeError(f"layer {layer} is not what comes next in this step")
        step.done += 1
        return step

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """In the block, an error leaves the other processes waiting in a collective, which `finish` cannot repair;
        `finish` then raises."""
        self._between = True
        yield
        self._between = False

    def _shape_of(self, layer: int, rank: int) -> AdapterShape:
        """The shape of one layer's inner factors, for the experts of one owner."""
        names = self._owners[layer].names
        return AdapterShape(replace(self._config, num_experts=self.each), rank, only=(*names.inner_b, names.down_a))


def _totals(counts: PerGroup) -> list[int]:
    return [sum(each) for each in counts]


def _rows(tensor: Tensor, into: list[int], of: range) -> Tensor:
    """The rows that came from these processes."""
    return tensor[sum(into[: of.start]) : sum(into[: of.stop])]


def _arenas(flat: Tensor, shapes: list[AdapterShape]) -> Iterator[Adapter]:
    """Views of arenas that lie one after another in `flat`. Their scale is never used."""
    sizes = [shape.numel for shape in shapes]
    for shape, part in zip(shapes, flat.split_with_sizes(sizes), strict=True):
        yield Adapter(shape, part, 1.0)


def _raise_for(states: list[int], counts: PerGroup) -> None:
    for owner, of in enumerate(counts):
        if any(of) and states[owner] == NO_MEMORY:
            raise torch.OutOfMemoryError(f"rank {owner} ran out of memory over pairs of its experts")
        if any(of) and states[owner] == FAILED:
            raise OwnerFailed(f"rank {owner} could not compute pairs of its experts; its log says why")
