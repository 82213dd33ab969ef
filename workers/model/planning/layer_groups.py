"""Which layers keep keys and values together.

In most models all layers are one group. Where some have a window, layers with and without are groups apart, all of as
many layers, so that what they keep of a token is equally large and comes from one pool; and what a group with a window
has no use for any more goes back to it (`workers/generator/cache/page_groups.py`).
"""

from __future__ import annotations

import math

from workers.model.config import DecoderConfig

#: With more groups, each sequence costs more than they save; then all layers are one group, which keeps everything.
MOST_GROUPS = 4


def layer_groups(config: DecoderConfig, context: int) -> list[tuple[tuple[int, ...], int]]:
    """The layers of each group and their window (0: all positions). If there are layers that attend to all of
    `context`, the first group has such."""
    by_window: dict[int, list[int]] = {}
    for layer in config.attention_layers:
        window = config.window_of(layer)
        by_window.setdefault(window if window < context else 0, []).append(layer)
    size = math.gcd(*map(len, by_window.values()))
    every = [layer for layers in by_window.values() for layer in layers]
    # The routes of a sequence, kept beside the keys of the first group, are asked for when it ends.
    if not every or len(every) > MOST_GROUPS * size or (0 not in by_window and config.num_experts):
        return [(tuple(sorted(every)), 0)]
    return [
        (tuple(layers[at : at + size]), window)
        for window, layers in sorted(by_window.items())
        for at in range(0, len(layers), size)
    ]
