"""The states of recurrent layers, beside the pages of keys and values.

A state is as large as the keys and values of hundreds of tokens and is replaced by every token, so it is not paged:
each sequence has its `States`, which a pass reads and never writes (`recur.py`). What a pass computes is taken over
when it has succeeded, so that a failed one is repeated from the same bits; siblings begin with the states of their
prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

from workers.model.recur import State

#: The state of each recurrent layer after some tokens of one sequence.
States = dict[int, State]

KeyT = TypeVar("KeyT", bound=Hashable)


def moved(states: States, device: torch.device | str) -> States:
    """A copy on this device that shares no memory with a larger tensor."""
    return {layer: tuple(part.to(device, copy=True) for part in state) for layer, state in states.items()}


class KeptStates(Generic[KeyT]):
    """At most `capacity` states by key; the least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[KeyT, States] = OrderedDict()

    def __contains__(self, key: KeyT) -> bool:
        return key in self._kept

    def use(self, key: KeyT) -> States:
        self._kept.move_to_end(key)
        return self._kept[key]

    def keep(self, key: KeyT, states: States) -> None:
        self._kept[key] = states
        self._kept.move_to_end(key)
        if len(self._kept) > self.capacity:
            self._kept.popitem(last=False)
