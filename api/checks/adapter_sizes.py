"""The sizes of runs: by these their steps and saves are weighed (`scheduler.order.light_work`), and their storage is
estimated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from scheduler.links.messages import OpKind, RunSpec
from scheduler.order.light_work import Sizes, SizesOf
from workers.model.card import ModelCard


def sizes_of(cards: Mapping[str, ModelCard]) -> SizesOf:
    """A function that gives the sizes of runs on these base models."""

    @lru_cache(maxsize=1024)
    def sizes(base_model: str, rank: int, attn: bool, mlp: bool, unembed: bool) -> Sizes | None:
        card = cards.get(base_model)
        if card is None:
            return None
        return Sizes(card.adapter_parameters(rank, attn, mlp, unembed), card.config.active_parameters)

    return lambda run: sizes(run.base_model, run.rank, run.train_attn, run.train_mlp, run.train_unembed)


#: How many moments (running means of gradients or of their squares) an optimizer keeps for each weight.
_MOMENTS = {"adamw": 2, "dimuon": 1}


def stored_bytes(run: RunSpec, sizes: Sizes | None, kind: OpKind) -> int:
    """About how many bytes a save of a run takes: float32 weights, and for the state also the optimizer's moments."""
    if sizes is None:
        return 0
    copies = 1 + (_MOMENTS[run.optimizer] if kind is OpKind.SAVE_STATE else 0)
    return 4 * sizes.adapter * copies
