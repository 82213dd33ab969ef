"""Where the adapters of an expert block find their rows.

The pairs of one group and one expert are few when tenants send little, and a call per (expert, group) would cost more
than its arithmetic. So the pairs of a group are laid out in slots: every expert gets as many as the group's busiest
expert has pairs, empty ones hold zeros, and one batched product serves all experts of the group. A group whose pairs
crowd on few experts has no empty slots and goes expert by expert. Which of the two depends on the group alone, so that
its results do; what lies beside it in memory does not change its alignment either.

Groups of one rank share the tensors (a bucket), so that gathering into slots and back costs one call for all of them.

Shapes: T tokens of the bucket's groups, K choices, P = all pairs sorted by expert, S the bucket's pairs, Q its slots,
E experts, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from workers.model.lora_rows import Group, LoraRows
from workers.model.routing import Routing

#: A call costs about as much as so many rows of a product: what an empty slot is worth.
CALL_ROWS = 64

#: Groups start at multiples of this, which keeps them on cache lines for any rank.
ALIGN_ROWS = 16


@dataclass(frozen=True)
class Experts:
    """How the slots of one group are divided: `each` of them to every one of `num_experts`, or, when `each` is 0,
    `sizes` of them in turn to those in `busy`."""

    num_experts: int
    each: int
    busy: list[int]
    sizes: list[int]

    def times(self, x_QI: Tensor, weight_EIO: Tensor, out_QO: Tensor) -> None:
        """out = x W of each slot's expert. `out` must be contiguous: torch batches no other in one call."""
        if self.each:
            e, m = self.num_experts, self.each
            torch.bmm(x_QI.view(e, m, -1), weight_EIO, out=out_QO.view(e, m, -1))
            return
        weights, xs, outs = weight_EIO.unbind(), x_QI.split_with_sizes(self.sizes), out_QO.split_with_sizes(self.sizes)
        for expert, x, out in zip(self.busy, xs, outs, strict=True):
            torch.mm(x, weights[expert], out=out)

    def add_outer(self, x_QI: Tensor, y_QO: Tensor, sum_EIO: Tensor) -> None:
        """sum += x^T y over the slots of each expert."""
        if self.each:
            e, m = self.num_experts, self.each
            sum_EIO.baddbmm_(x_QI.view(e, m, -1).transpose(1, 2), y_QO.view(e, m, -1))
            return
        sums, xs, ys = sum_EIO.unbind(), x_QI.split_with_sizes(self.sizes), y_QO.split_with_sizes(self.sizes)
        for expert, x, y in zip(self.busy, xs, ys, strict=True):
            sums[expert].addmm_(x.t(), y)


class Cuts:
    """Cuts a tensor into the rows of each group, `sizes` of them, with gaps up to the next aligned row between."""

    def __init__(self, sizes: Sequence[int]) -> None:
        rooms = [-(-size // ALIGN_ROWS) * ALIGN_ROWS for size in sizes]
        self.starts = [0, *accumulate(rooms)][:-1]
        self.rows = sum(rooms)
        self._sizes = [n for size, room in zip(sizes, rooms, strict=True) for n in (size, room - size)]

    def of(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[: self.rows].split_with_sizes(self._sizes)[::2]


@dataclass(frozen=True)
class Bucket:
    """The groups of one rank. `tokens` cuts tensors of their T tokens by group, `slots` those of Q slots.

    `row_T` and `scale_T1` are the batch row and the scale of each token; `token_Q` (T for an empty slot) and `pair_Q`
    (some pair of the same group for an empty slot) what a slot holds; `pair_S` and `slot_S` each pair and its slot;
    `slot_X` [T * choices] the slot of each token's choices. Gaps hold anything."""

    rank: int
    groups: list[Group]
    experts: list[Experts]
    tokens: Cuts
    slots: Cuts
    row_T: Tensor
    scale_T1: Tensor
    token_Q: Tensor
    pair_Q: Tensor
    pair_S: Tensor
    slot_S: Tensor
    slot_X: Tensor


def buckets(routing: Routing, rows: LoraRows | None, groups: Sequence[Group]) -> list[Bucket]:
    """The slots of `groups`, by rank."""
    if rows is None or not groups:
        return []
    num_groups, device = len(rows.adapters), routing.experts.device
    group_P = rows.group_of_row(device)[routing.token]
    run_P = routing.experts * num_groups + group_P
    counts_EG = torch.bincount(run_P, minlength=routing.num_experts * num_groups).view(-1, num_groups)
    by_rank: dict[int, list[Group]] = {}
    for group in groups:
        by_rank.setdefault(group.adapter.rank, []).append(group)
    layout = _Layout(routing, group_P, run_P, counts_EG)
    return [layout.bucket(rank, members) for rank, members in by_rank.items()]


@dataclass(frozen=True)
class _Layout:
    """What the buckets of one batch share: the group and the (expert, group) run of each pair, and the runs' sizes."""

    routing: Routing
    group_P: Tensor
    run_P: Tensor
    counts_EG: Tensor

    def bucket(self, rank: int, groups: list[Group]) -> Bucket:
        routing, counts, device = self.routing, self.counts_EG, self.counts_EG.device
        mine = torch.tensor([group.index for group in groups], device=device)
        own = counts[:, mine]  # [E, groups of this bucket]
        busiest = own.amax(0)
        batched = routing.num_experts * busiest <= own.sum(0) + CALL_ROWS * (own > 0).sum(0)
        room = torch.where(batched, busiest, own)
        slots = Cuts(room.sum(0).tolist())
        tokens = Cuts([group.stop - group.start for group in groups])

        def of_groups(values: Sequence[int] | Tensor) -> Tensor:
            """By index of all groups; those of other buckets -1 or 0."""
            spread = torch.full((counts.shape[1],), -1, device=device)
            spread[mine] = torch.as_tensor(values, device=device)
            return spread

        first_slot = torch.zeros_like(counts)
        first_slot[:, mine] = torch.tensor(slots.starts, device=device) + room.cumsum(0) - room
        first_pair = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
        pair_S = (of_groups(range(len(groups))) >= 0)[self.group_P].nonzero()[:, 0]
        run_S = self.run_P[pair_S]
        # The sorted pairs of a run are consecutive: a pair's place in it is its distance from the first.
        slot_S = first_slot.flatten()[run_S] + pair_S - first_pair.flatten()[run_S]
        of_Q = _group_of_row(slots, device)
        some_pair = torch.where(own > 0, first_pair[:, mine], len(self.run_P)).amin(0)
        pair_Q, token_Q = some_pair[of_Q], torch.full_like(of_Q, tokens.rows)

        shifts = [at - group.start for at, group in zip(tokens.starts, groups, strict=True)]
        token_S = routing.token[pair_S] + of_groups(shifts)[self.group_P[pair_S]]
        pair_Q[slot_S], token_Q[slot_S] = pair_S, token_S
        slot_X = torch.zeros(tokens.rows * routing.choices, dtype=torch.int64, device=device)
        slot_X[token_S * routing.choices + routing.order[pair_S] % routing.choices] = slot_S
        of_T = _group_of_row(tokens, device)
        row_T = torch.arange(tokens.rows, device=device) - torch.tensor(shifts, device=device)[of_T]
        scales = torch.tensor([group.scale for group in groups], device=device)
        return Bucket(
            rank=rank,
            groups=groups,
            experts=[
                _experts(counts, each if whole else 0)
                for counts, each, whole in zip(own.t().tolist(), busiest.tolist(), batched.tolist(), strict=True)
            ],
            tokens=tokens,
            slots=slots,
            row_T=row_T.clamp_(max=len(routing.token) // routing.choices - 1),
            scale_T1=scales[of_T][:, None],
            token_Q=token_Q,
            pair_Q=pair_Q,
            pair_S=pair_S,
            slot_S=slot_S,
            slot_X=slot_X,
        )


def _group_of_row(cuts: Cuts, device: torch.device) -> Tensor:
    """int64 [rows]: whose each row is, the gap after a group counted as its own."""
    ends = [*cuts.starts[1:], cuts.rows]
    rooms = torch.tensor([end - start for start, end in zip(cuts.starts, ends, strict=True)], device=device)
    index = torch.arange(len(cuts.starts), device=device)
    return torch.repeat_interleave(index, rooms, output_size=cuts.rows)


def _experts(counts: list[int], each: int) -> Experts:
    busy = [expert for expert, count in enumerate(counts) if count and not each]
    return Experts(len(counts), each, busy, [counts[expert] for expert in busy])
