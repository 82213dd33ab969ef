"""The pages of a group of layers.

A page holds keys and values of some positions for one group (`workers/model/planning/layer_groups.py`). What a group
with a window has passed goes back to the pool, from which all groups take.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.generator.cache.kv_cache import PAGE_TOKENS, pages_of
from workers.model.config import DecoderConfig
from workers.model.planning.layer_groups import layer_groups


@dataclass(frozen=True)
class PageGroup:
    """`window`: how many positions its layers attend to; 0: all."""

    layers: tuple[int, ...]
    window: int = 0

    def passed(self, position: int) -> int:
        """How many pages at the head of a sequence are out of reach of `position` and of all after it."""
        return max(0, position + 1 - self.window) // PAGE_TOKENS if self.window else 0

    def most(self, start: int, stop: int, ahead: int) -> int:
        """The pages to compute positions start:stop with, at most `ahead` of them at a time."""
        held = pages_of(stop) - self.passed(start)
        return min(held, pages_of(self.window) + pages_of(ahead)) if self.window else held


@dataclass
class Held:
    """What a sequence holds of one group: its pages but the first `gone`, which it has given back."""

    gone: int
    pages: list[int]

    @property
    def start(self) -> int:
        """The first position that is in these pages."""
        return self.gone * PAGE_TOKENS

    @property
    def stop(self) -> int:
        """The first position beyond them."""
        return (self.gone + len(self.pages)) * PAGE_TOKENS

    def of(self, position: int) -> int:
        return self.pages[position // PAGE_TOKENS - self.gone]


def page_groups(config: DecoderConfig, context: int) -> tuple[PageGroup, ...]:
    return tuple(PageGroup(layers, window) for layers, window in layer_groups(config, context))
