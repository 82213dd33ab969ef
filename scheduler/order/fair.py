"""Who is next: weighted start-time fair queueing over a tree of flows (Goyal, Vin, Cheng, SIGCOMM 1996).

Paths are (base model, organisation, priority, lane); a lane is a run or a sampler. Every node serves its children in
the order of their start tags. A child of weight w that is served c tokens gets the next start tag S + c / w; a child
that becomes ready after being idle starts at the node's virtual time, so idling earns no credit and flooding earns no
debt beyond what was served. Organisations weigh what the caller says, priorities what PRIORITY_SHARES says, all else 1.

Bound, at every level: while children i and j both stay ready, the tokens they are served satisfy
|W_i / w_i - W_j / w_j| <= c_i / w_i + c_j / w_j, with c the cost of the largest item of each. A waiting child's tag
stands still while those of its siblings grow: that is the aging. A batch lane behind a flood of interactive work of its
own organisation waits for at most the ratio of PRIORITY_SHARES times its own last item, plus one item.

`only` takes what one of several trainers may have. Tags are for all of them together, so the bound holds for the sums
over all trainers, while i and j both have something for every trainer that comes. Where one comes that i has nothing
for, j gets ahead, and i is first wherever it can be served until it has caught up, with the last LAG tokens (per
weight) of that: what is beyond was taken from nobody, and is nobody's debt.

The cost of a sample is an estimate until it ends; `correct` then charges what it really used. Each side of the bound
grows by the error of the estimates in flight. Pure state, no clock, no I/O: the journal pushes, the desks pop.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scheduler.links.contract import Path, weights_of

T = TypeVar("T")
#: A filter: given the key of a flow at the end of a path, True if the flow may be served.
Only = Callable[[str], bool]
#: How many tokens, per weight, a flow may fall behind at most while others are served by trainers that cannot serve it.
LAG = 1 << 16


@dataclass
class _Node(Generic[T]):
    children: dict[str, _Node[T]] = field(default_factory=dict)
    items: deque[tuple[T, int]] = field(default_factory=deque)  # leaves only: (item, cost)
    queued: int = 0  # leaves only: the cost of all items
    ready: list[tuple[float, int, str]] = field(default_factory=list)  # heap of (start tag, arrival, child)
    weight: int = 1
    virtual: float = 0.0  # start tag of the child in service
    finish: float = 0.0  # its next start tag, on its parent's clock

    def __bool__(self) -> bool:
        return bool(self.items) or bool(self.ready)


class FairTree(Generic[T]):
    """Items queued at paths; first in, first out within one path."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()
        self._arrivals = 0

    def push(self, path: Path, item: T, cost: int, *, weight: int = 1) -> None:
        """Queue `item`, which will use `cost` tokens (at least 1), at the end of `path`. `weight` becomes the weight of
        the path's organisation."""
        node = self._root
        for key, share in zip(path, weights_of(path, weight), strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node()
            child.weight = share
            if not (child.items or child.ready):  # same as `not child`, but without a call
                self._enter(node, key, max(node.virtual, child.finish))
            node = child
        cost = max(1, cost)
        node.items.append((item, cost))
        node.queued += cost

    def next(self, prefix: Path = (), only: Only | None = None) -> Path | None:
        """The path of the fairest item at or below `prefix`."""
        node, path = self._find(prefix), list(prefix)
        while node is not None and node.ready:
            entry = _first(node, only)
            if entry is None:
                return None
            path.append(entry[2])
            node = node.children[entry[2]]
        return tuple(path) if node else None

    def peek(self, prefix: Path = ()) -> tuple[T, int] | None:
        """The item that `pop` would return, and its cost."""
        path = self.next(prefix)
        node = self._find(path) if path is not None else None
        return node.items[0] if node else None

    def pop(self, prefix: Path = (), only: Only | None = None) -> T | None:
        """Take the fairest item at or below `prefix`. With `only`, `prefix` must not be a whole path."""
        path = self.next(prefix, only)
        return self.take(path, len(prefix)) if path is not None else None

    def take(self, path: Path, given: int) -> T:
        """Take the first item of `path`, and charge every flow on it. `path` was found by `next` below its first
        `given` keys."""
        return self._serve(self._root, path, given)[0]

    def queued(self, path: Path) -> int:
        """The cost of all items at one path."""
        node = self._find(path)
        return node.queued if node else 0

    def correct(self, path: Path, tokens: int) -> None:
        """What was served from `path` has used `tokens` more than it was charged (fewer, if negative).

        Credit may move a child to before the virtual time. Children that came in at the virtual time are moved there,
        too, so that none that waits for its first turn is overtaken because another used less.
        """
        node = self._root
        for key in path:
            child = node.children.get(key)
            if child is None:
                return
            shift = tokens / child.weight
            child.finish += shift
            if child:
                self._shift(node, key, shift)
            node = child

    def ahead(self, path: Path, mine: Callable[[T], bool], most: int = 1000) -> int:
        """About how many items are served before the first of `path` that is `mine`, if nothing else comes. Counted
        up to `most`.

        For every item of ours to be served, each sibling on the way that is ready is served about once, or as its
        weight says; those whose turn is next, once more. Exact when all cost and weigh the same and all queues are
        long."""
        nodes = [self._root]
        for key in path:
            if key not in nodes[-1].children:
                return 0
            nodes.append(nodes[-1].children[key])
        ahead = next((i for i, (item, _) in enumerate(nodes[-1].items) if mine(item) or i == most), 0)
        for depth in range(len(path) - 1, -1, -1):
            entries = {key: entry for *entry, key in nodes[depth].ready}
            own = entries.pop(path[depth], None)
            if own is None:
                return 0
            turns = ahead / nodes[depth + 1].weight
            for key, entry in entries.items():
                if ahead >= most:
                    return most
                sibling = nodes[depth].children[key]
                ahead += _count(sibling, int(turns * sibling.weight) + (entry < own))
        return min(ahead, most)

    def children(self, prefix: Path = ()) -> list[str]:
        """The flows directly below `prefix` that have items, fairest first."""
        node = self._find(prefix)
        return [key for _, _, key in sorted(node.ready)] if node else []

    def remove(self, path: Path) -> list[T]:
        """Take all items out of one path, in order. Their charges stay."""
        node = self._find(path)
        if not node:
            return []
        taken = [item for item, _ in node.items]
        node.items.clear()
        node.queued = 0
        self._leave(path)
        return taken

    def discard(self, path: Path, item: T) -> bool:
        """Take one item out of its path, wherever it stands. False if it is not there."""
        node = self._find(path)
        place = next((i for i, (other, _) in enumerate(node.items) if other == item), None) if node else None
        if node is None or place is None:
            return False
        node.queued -= node.items[place][1]
        del node.items[place]
        self._leave(path)
        return True

    def _leave(self, path: Path) -> None:
        """Empty flows on `path` are no longer ready."""
        for depth in range(len(path) - 1, -1, -1):
            parent, child = self._find(path[:depth]), self._find(path[: depth + 1])
            if parent is None or child:
                break
            parent.ready = [entry for entry in parent.ready if entry[2] != path[depth]]
            heapq.heapify(parent.ready)

    def __iter__(self) -> Iterator[T]:
        stack = [self._root]
        while stack:
            node = stack.pop()
            yield from (item for item, _ in node.items)
            stack.extend(node.children.values())

    def _find(self, path: Path) -> _Node[T] | None:
        node = self._root
        for key in path:
            if key not in node.children:
                return None
            node = node.children[key]
        return node

    def _enter(self, node: _Node[T], key: str, start: float) -> None:
        self._arrivals += 1
        heapq.heappush(node.ready, (start, self._arrivals, key))

    def _shift(self, node: _Node[T], key: str, shift: float) -> None:
        self._arrivals += 1  # among equal tags, the corrected one comes last
        start = shift + next(start for start, _, k in node.ready if k == key)
        virtual = start if start < node.virtual else math.inf  # where others go back to
        node.virtual = min(node.virtual, start)
        node.ready = [
            (start, self._arrivals, k) if k == key else (max(node.children[k].finish, min(tag, virtual)), n, k)
            for tag, n, k in node.ready
        ]
        heapq.heapify(node.ready)

    def _serve(self, node: _Node[T], path: Path, given: int) -> tuple[T, int]:
        if not node.ready:
            node.queued -= node.items[0][1]
            return node.items.popleft()
        node.virtual = max(node.virtual, node.ready[0][0])
        key = path[0]
        if node.ready[0][2] == key:
            start, _, _ = heapq.heappop(node.ready)
        else:
            entry = next(e for e in node.ready if e[2] == key)
            start, _, _ = entry
            node.ready.remove(entry)
            if given <= 0 and min(node.ready)[0] < start - LAG:
                node.ready = [(max(tag, start - LAG), arrival, other) for tag, arrival, other in node.ready]
            heapq.heapify(node.ready)
        child = node.children[key]
        item, cost = self._serve(child, path[1:], given - 1)
        child.finish = start + cost / child.weight
        if child.items or child.ready:
            self._enter(node, key, child.finish)
        self._forget_idle(node)
        return item, cost

    def _forget_idle(self, node: _Node[T]) -> None:
        """Drop children that are empty and owe nothing: they would start at the virtual time anyway."""
        if len(node.children) > 2 * len(node.ready) + 64:
            node.children = {k: c for k, c in node.children.items() if c or c.finish > node.virtual}


def _first(node: _Node[T], only: Only | None) -> tuple[float, int, str] | None:
    """The fairest of a node's flows that has items for `only`."""
    first = node.ready[0]
    if only is None or _has(node.children[first[2]], first[2], only):
        return first
    others = sorted(node.ready)[1:]
    return next((entry for entry in others if _has(node.children[entry[2]], entry[2], only)), None)


def _has(node: _Node[T], key: str, only: Only) -> bool:
    if node.items:
        return only(key)
    for _, _, child in node.ready:  # noqa: SIM110 - a leader spends much of its time here
        if _has(node.children[child], child, only):
            return True
    return False


def _count(node: _Node[T], most: int) -> int:
    """The items at or below `node`, counted up to `most`."""
    count, stack = 0, [node]
    while stack and count < most:
        node = stack.pop()
        count += len(node.items)
        stack.extend(node.children[key] for _, _, key in node.ready)
    return min(count, most)
