"""How large runs are: by that their steps and saves are weighed (`scheduler.order.light_work`), and what they store."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from scheduler.links.messages import OpKind, RunSpec
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


#: Moments of an optimizer beside the weights, in sizes of the adapter.
_MOMENTS = {"adamw": 2, "dimuon": 1}


def stored_bytes(run: RunSpec, sizes: Sizes | None, kind: OpKind) -> int:
    """About what a save of a run stores: float32 weights, and the optimizer's moments with the state."""
    if sizes is None:
        return 0
    copies = 1 + (_MOMENTS[run.optimizer] if kind is OpKind.SAVE_STATE else 0)
    return 4 * sizes.adapter * copies
