"""The pages of a group of layers.

A page holds keys and values of some positions for one group (`workers/model/planning/layer_groups.py`). Pages that lie
before a group's window go back to the pool, which all groups share.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.generator.cache.kv_cache import PAGE_TOKENS, pages_of
from workers.model.config import DecoderConfig
from workers.model.planning.layer_groups import layer_groups


@dataclass(frozen=True)
class PageGroup:
    """Layers whose pages are kept together. `window`: how many positions these layers attend to; 0: all."""

    layers: tuple[int, ...]
    window: int = 0

    def passed(self, position: int) -> int:
        """How many of a sequence's first pages neither `position` nor any later one can reach."""
        return max(0, position + 1 - self.window) // PAGE_TOKENS if self.window else 0

    def most(self, start: int, stop: int, ahead: int) -> int:
        """How many pages computing positions start:stop needs at most, at most `ahead` positions at a time."""
        held = pages_of(stop) - self.passed(start)
        return min(held, pages_of(self.window) + pages_of(ahead)) if self.window else held


@dataclass
class Held:
    """The pages of one group that a sequence holds: all but the first `gone`, which it has given back."""

    gone: int
    pages: list[int]

    @property
    def start(self) -> int:
        """The first position that is in these pages."""
        return self.gone * PAGE_TOKENS

    @property
    def stop(self) -> int:
        """The first position beyond the pages."""
        return (self.gone + len(self.pages)) * PAGE_TOKENS

    def of(self, position: int) -> int:
        return self.pages[position // PAGE_TOKENS - self.gone]


def page_groups(config: DecoderConfig, context: int) -> tuple[PageGroup, ...]:
    return tuple(PageGroup(layers, window) for layers, window in layer_groups(config, context))
