"""The fair queue against its docstring's rule in plain code: exact fractions, lists that are searched from front to
back, nothing forgotten. Random programs must take the same items from both in the same order."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from scheduler.links.contract import PRIORITY_SHARES
from scheduler.order import fair
from scheduler.order.fair import FairTree, Only
from tests.search import chance

Path = tuple[str, ...]
#: A float divides exactly by these, so both agree on what is equal. PRIORITY_SHARES is 16 to 1.
WEIGHTS = (1, 1, 2, 4)
LAG = 40


@dataclass
class Flow:
    """`tag` and `since` (the number of its arrival) hold while something is in it."""

    weight: int = 1
    finish: Fraction = Fraction(0)
    tag: Fraction = Fraction(0)
    since: int = 0
    virtual: Fraction = Fraction(0)
    items: list[tuple[int, int]] = field(default_factory=list)


class Plain:
    def __init__(self) -> None:
        self.flows: dict[Path, Flow] = {(): Flow()}
        self.arrivals = 0

    def below(self, path: Path) -> list[Path]:
        """The paths of whole lanes at or below `path` that have items."""
        return [p for p, flow in self.flows.items() if flow.items and p[: len(path)] == path]

    def ready(self, path: Path) -> list[Path]:
        """The flows directly below `path` with something in them, fairest first."""
        children = {p[: len(path) + 1] for p in self.below(path) if len(p) > len(path)}
        return sorted(children, key=lambda p: (self.flows[p].tag, self.flows[p].since))

    def enter(self, path: Path, tag: Fraction) -> None:
        self.arrivals += 1
        self.flows[path].tag, self.flows[path].since = tag, self.arrivals

    def push(self, path: Path, item: int, cost: int, weight: int) -> None:
        weights = (1, weight, PRIORITY_SHARES[path[2]], 1)
        for end in range(1, len(path) + 1):
            here, parent = path[:end], self.flows[path[: end - 1]]
            flow = self.flows.setdefault(here, Flow())
            flow.weight = weights[end - 1]
            if not self.below(here):
                self.enter(here, max(parent.virtual, flow.finish))
        self.flows[path].items.append((item, max(1, cost)))

    def line(self, prefix: Path, only: Only | None) -> list[Path]:
        """The flows on the way to the next item at or below `prefix`, from the top; empty if there is none."""
        if not self.below(prefix):
            return []
        way = [prefix[:end] for end in range(1, len(prefix) + 1)]
        here = prefix
        while not self.flows[here].items:
            may = [p for p in self.ready(here) if only is None or any(only(lane[-1]) for lane in self.below(p))]
            if not may:
                return []
            here = may[0]
            way.append(here)
        return way

    def pop(self, prefix: Path, only: Only | None) -> int | None:
        way = self.line(prefix, only)
        if not way:
            return None
        for here in way:
            parent = self.flows[here[:-1]]
            parent.virtual = max(parent.virtual, self.flows[self.ready(here[:-1])[0]].tag)
        for here in way[len(prefix) :] if only is not None else []:
            for other in self.ready(here[:-1]):
                if other != here:
                    self.flows[other].tag = max(self.flows[other].tag, self.flows[here].tag - LAG)
        item, cost = self.flows[way[-1]].items.pop(0)
        for here in reversed(way):
            flow = self.flows[here]
            flow.finish = flow.tag + Fraction(cost, flow.weight)
            if self.below(here):
                self.enter(here, flow.finish)
        return item

    def correct(self, path: Path, tokens: int) -> None:
        for end in range(1, len(path) + 1):
            here, parent = path[:end], self.flows[path[: end - 1]]
            if here not in self.flows:
                return
            flow = self.flows[here]
            shift = Fraction(tokens, flow.weight)
            flow.finish += shift
            if not self.below(here):
                continue
            self.enter(here, flow.tag + shift)
            if flow.tag < parent.virtual:  # who came in at the virtual time goes back with it
                parent.virtual = flow.tag
                for other in self.ready(here[:-1]):
                    if other != here:
                        known = self.flows[other]
                        known.tag = max(known.finish, min(known.tag, flow.tag))
            else:
                for other in self.ready(here[:-1]):
                    if other != here:
                        self.flows[other].tag = max(self.flows[other].finish, self.flows[other].tag)

    def take(self, path: Path, chosen: list[int]) -> None:
        self.flows[path].items = [each for each in self.flows[path].items if each[0] not in chosen]


def lanes(models: str, organisations: str, runs: str) -> list[Path]:
    return [(m, o, p, o + r) for m in models for o in organisations for p in PRIORITY_SHARES for r in runs]


def same(tree: FairTree[int], plain: Plain, all_lanes: list[Path], only: Only) -> None:
    """The answers of both to everything that can be asked."""
    for prefix in {lane[:end] for lane in all_lanes for end in (0, 1, 2, 3)}:
        assert tree.children(prefix) == [p[-1] for p in plain.ready(prefix)]
    for chosen in (None, only):
        for prefix in ((), ("m",), ("n",), ("none",)):
            way = plain.line(prefix, chosen)
            path = tree.next(prefix, chosen)
            assert (path and tree.peek(path)) == (plain.flows[way[-1]].items[0] if way else None)
    for lane in all_lanes:
        items = plain.flows[lane].items if lane in plain.flows else []
        assert tree.queued(lane) == sum(cost for _, cost in items)
        assert tree.peek(lane) == (items[0] if items else None)
    assert sorted(tree) == sorted(item for flow in plain.flows.values() for item, _ in flow.items)


@pytest.mark.search
@pytest.mark.parametrize("seed", range(12))
def test_it_does_what_its_rule_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    luck = chance(seed)
    monkeypatch.setattr(fair, "LAG", LAG)
    all_lanes = lanes("mn", "abc", "12") if seed % 2 else lanes("m", "ab", "12")
    tree, plain = FairTree[int](), Plain()
    weights = {organisation: luck.choice(WEIGHTS) for organisation in "abc"}
    mine: list[str] = []

    def only(lane: str) -> bool:
        return lane in mine

    for number in range(150):
        lane = luck.choice(all_lanes)
        mine = luck.sample(sorted({each[-1] for each in all_lanes}), 2)
        what = luck.choices(("push", "pop", "correct", "remove", "discard"), (50, 40, 12, 1, 3))[0]
        if what == "push":
            if luck.random() < 0.1:
                weights[lane[1]] = luck.choice(WEIGHTS)
            cost = luck.choice((0, 1, 1, 5, 16, 40))
            tree.push(lane, number, cost, weight=weights[lane[1]])
            plain.push(lane, number, cost, weights[lane[1]])
        elif what == "pop":
            prefix = luck.choice(((), (), lane[:1], lane[:2], lane))
            chosen = luck.choice((None, only)) if len(prefix) < 2 else None
            assert tree.pop(prefix, chosen) == plain.pop(prefix, chosen)
        elif what == "correct":
            tokens = luck.choice((-40, -16, -5, -1, 1, 5, 40))
            tree.correct(lane, tokens)
            plain.correct(lane, tokens)
        elif lane in plain.flows:
            items = [item for item, _ in plain.flows[lane].items]
            gone = items if what == "remove" else [luck.choice([*items, -1])]
            if what == "remove":
                assert tree.remove(lane) == items
            else:
                assert tree.discard(lane, gone[0]) == (gone[0] in items)
            plain.take(lane, gone)
        same(tree, plain, all_lanes, only)
