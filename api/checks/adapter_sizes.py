"""How large runs are: by that their steps and saves are weighed (`scheduler.order.light_work`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from scheduler.order.light_work import Sizes, SizesOf
from workers.model.card import ModelCard


def sizes_of(cards: Mapping[str, ModelCard]) -> SizesOf:
    """The sizes of runs on these base models."""

    @lru_cache(maxsize=1024)
    def sizes(base_model: str, rank: int, attn: bool, mlp: bool, unembed: bool) -> Sizes | None:
        card = cards.get(base_model)
        if card is None:
            return None
        return Sizes(card.adapter_parameters(rank, attn, mlp, unembed), card.config.active_parameters)

    return lambda run: sizes(run.base_model, run.rank, run.train_attn, run.train_mlp, run.train_unembed)
