"""Slots of adapters: every pair has one, of its own expert and group, and a group's layout is its own affair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.model.adapter import Adapter, AdapterShape
from workers.model.config import DecoderConfig
from workers.model.lora_rows import LoraRows
from workers.model.moe_slots import Bucket, Experts, buckets
from workers.model.routing import Routing

EXPERTS, CHOICES = 6, 2
CONFIG = DecoderConfig(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=8,
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    context_length=64,
    num_experts=EXPERTS,
    experts_per_token=CHOICES,
    moe_intermediate_size=8,
)


def chosen(tokens: int, seed: int, crowded: bool = False) -> Tensor:
    """[tokens, choices] distinct experts; crowded: always the first two."""
    if crowded:
        return torch.tensor([[0, 1]]).repeat(tokens, 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(tokens)])


def laid_out(experts: list[Tensor], ranks: list[int | None]) -> tuple[Routing, LoraRows, list[Bucket]]:
    offsets = [0]
    for own in experts:
        offsets.append(offsets[-1] + len(own))
    adapters = [None if r is None else Adapter.zeros(AdapterShape(CONFIG, r), scale=r) for r in ranks]
    rows, routing = LoraRows(offsets, adapters), Routing(torch.cat(experts), EXPERTS)
    return routing, rows, buckets(routing, rows, rows.groups("layers.0.mlp.down_A"))


GROUPS = [chosen(5, 1), chosen(300, 2, crowded=True), chosen(7, 3), chosen(1, 4), chosen(40, 5)]


def test_every_pair_has_a_slot_of_its_expert_and_group() -> None:
    routing, rows, found = laid_out(GROUPS, [4, 2, None, 4, 2])
    assert [(bucket.rank, [g.index for g in bucket.groups]) for bucket in found] == [(4, [0, 3]), (2, [1, 4])]
    group_P = rows.group_of_row(torch.device("cpu"))[routing.token]
    for bucket in found:
        assert len(bucket.slot_S.unique()) == len(bucket.slot_S) == sum(len(GROUPS[g.index]) for g in bucket.groups) * 2
        for group, experts, start in zip(bucket.groups, bucket.experts, bucket.slots.starts, strict=True):
            assert start % 16 == 0
            mine = group_P[bucket.pair_S] == group.index
            expert_of_slot = (
                torch.arange(EXPERTS).repeat_interleave(experts.each)
                if experts.each
                else torch.tensor(experts.busy).repeat_interleave(torch.tensor(experts.sizes))
            )
            assert torch.equal(expert_of_slot[bucket.slot_S[mine] - start], routing.experts[bucket.pair_S[mine]])
            own = slice(start, start + len(expert_of_slot))
            assert (group_P[bucket.pair_Q[own]] == group.index).all(), "an empty slot must not read a stranger's row"
            filled = bucket.token_Q[own] < bucket.tokens.rows
            assert int(filled.sum()) == len(GROUPS[group.index]) * CHOICES
            assert (bucket.scale_T1[bucket.token_Q[own][filled]] == group.scale).all()


def test_tokens_find_their_choices_again() -> None:
    routing, _, found = laid_out(GROUPS, [4, 2, None, 4, 2])
    for bucket in found:
        pair_of_slot = torch.full((bucket.slots.rows,), -1)
        pair_of_slot[bucket.slot_S] = bucket.pair_S
        slots_TK = bucket.slot_X.view(-1, CHOICES)
        for group, start in zip(bucket.groups, bucket.tokens.starts, strict=True):
            tokens = slice(start, start + group.stop - group.start)
            assert bucket.row_T[tokens].tolist() == list(range(group.start, group.stop))
            pairs = pair_of_slot[slots_TK[tokens]]
            expected = torch.arange(group.start * CHOICES, group.stop * CHOICES).view(-1, CHOICES)
            assert torch.equal(routing.order[pairs], expected)


def test_crowded_groups_go_expert_by_expert_and_spread_ones_in_one_call() -> None:
    _, _, [bucket] = laid_out([GROUPS[1], GROUPS[4]], [4, 4])
    crowded, spread = bucket.experts
    assert (crowded.each, crowded.busy, crowded.sizes) == (0, [0, 1], [300, 300])
    assert spread.each > 0


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_layout_of_a_group_does_not_depend_on_the_others(place: int) -> None:
    mine = chosen(9, 7)
    others = [GROUPS[1], GROUPS[4]]
    _, _, [alone] = laid_out([mine], [4])
    _, _, [crowd] = laid_out([*others[:place], mine, *others[place:]], [4, 4, 4])
    assert crowd.experts[place] == alone.experts[0]


@pytest.mark.parametrize("each", [3, 0], ids=["one call", "by expert"])
def test_products_of_slots(each: int) -> None:
    experts = Experts(4, each, [] if each else [0, 2, 3], [] if each else [5, 1, 6])
    owner = torch.arange(4).repeat_interleave(torch.tensor([3] * 4 if each else [5, 0, 1, 6]))
    x, weight, total = torch.randn(12, 5), torch.randn(4, 5, 7), torch.randn(4, 5, 7)
    y, before = torch.empty(12, 7), total.clone()
    experts.times(x, weight, y)
    torch.testing.assert_close(y, torch.stack([row @ weight[e] for row, e in zip(x, owner, strict=True)]))
    experts.add_outer(x, y, total)
    for e in range(4):
        torch.testing.assert_close(total[e], before[e] + x[owner == e].t() @ y[owner == e], atol=1e-4, rtol=1e-4)
