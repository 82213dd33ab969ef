"""Start-time fair queueing: order, the fairness bound, and no lost items."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.fair import FairTree


def drain(tree: FairTree[str], prefix: tuple[str, ...] = ()) -> list[str]:
    taken = []
    while (item := tree.pop(prefix)) is not None:
        taken.append(item)
    return taken


def test_one_path_is_first_in_first_out() -> None:
    tree: FairTree[str] = FairTree()
    for item in "abc":
        tree.push(("m", "org", "run"), item, 5)
    assert drain(tree) == ["a", "b", "c"]
    assert tree.peek() is None


def test_two_organisations_alternate_by_tokens_not_by_count() -> None:
    tree: FairTree[str] = FairTree()
    for i in range(3):
        tree.push(("m", "big", "r"), f"B{i}", 100)
    for i in range(6):
        tree.push(("m", "small", "r"), f"s{i}", 50)
    assert drain(tree) == ["B0", "s0", "s1", "B1", "s2", "s3", "B2", "s4", "s5"]


def test_many_runs_of_one_organisation_do_not_outweigh_one_run_of_another() -> None:
    tree: FairTree[str] = FairTree()
    for run in range(10):
        tree.push(("m", "crowd", f"r{run}"), "crowd", 10)
    tree.push(("m", "lone", "r"), "lone", 10)
    assert drain(tree).index("lone") == 1


def test_a_newcomer_starts_at_the_present_and_gets_no_credit_for_idling() -> None:
    tree: FairTree[str] = FairTree()
    for i in range(4):
        tree.push(("m", "busy", "r"), f"b{i}", 10)
    assert [tree.pop(), tree.pop()] == ["b0", "b1"]
    for i in range(4):
        tree.push(("m", "late", "r"), f"l{i}", 10)
    assert drain(tree) == ["l0", "b2", "l1", "b3", "l2", "l3"]


def test_pop_below_a_prefix_leaves_other_models_alone() -> None:
    tree: FairTree[str] = FairTree()
    tree.push(("m1", "o", "r"), "one", 1)
    tree.push(("m2", "o", "r"), "two", 1)
    assert drain(tree, ("m2",)) == ["two"]
    assert tree.peek(("m1",)) == ("one", 1)


def test_remove_takes_one_path_out_in_order() -> None:
    tree: FairTree[str] = FairTree()
    for run in ("r1", "r2"):
        for i in range(2):
            tree.push(("m", "o", run), f"{run}.{i}", 3)
    assert tree.remove(("m", "o", "r1")) == ["r1.0", "r1.1"]
    assert drain(tree) == ["r2.0", "r2.1"]
    tree.push(("m", "o", "r1"), "again", 1)
    assert drain(tree) == ["again"]


paths = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from("123"))
events = st.lists(st.one_of(st.tuples(paths, st.integers(1, 50)), st.none()), max_size=80)


@given(events)
def test_every_item_comes_out_once_and_in_order_of_its_path(script: list[tuple[tuple[str, ...], int] | None]) -> None:
    tree: FairTree[tuple[tuple[str, ...], int]] = FairTree()
    pushed: list[tuple[tuple[str, ...], int]] = []
    popped: list[tuple[tuple[str, ...], int]] = []
    for n, event in enumerate(script):
        if event is None:
            peeked = tree.peek()
            item = tree.pop()
            assert item == (peeked[0] if peeked else None)
            if item is not None:
                popped.append(item)
        else:
            pushed.append((event[0], n))
            tree.push(event[0], (event[0], n), event[1])
    assert sorted(tree) == sorted(set(pushed) - set(popped))
    while (item := tree.pop()) is not None:
        popped.append(item)
    assert sorted(popped) == sorted(pushed)
    for path in {p for p, _ in pushed}:
        assert [n for p, n in popped if p == path] == [n for p, n in pushed if p == path]


@given(st.lists(st.integers(1, 40), min_size=5, max_size=60), st.lists(st.integers(1, 40), min_size=5, max_size=60))
def test_while_both_are_ready_served_tokens_differ_by_at_most_the_largest_items(a: list[int], b: list[int]) -> None:
    tree: FairTree[tuple[str, int]] = FairTree()
    for key, costs in (("a", a), ("b", b)):
        for cost in costs:
            tree.push(("m", key, "r"), (key, cost), cost)
    served = {"a": 0, "b": 0}
    left = {"a": len(a), "b": len(b)}
    while left["a"] and left["b"]:
        item = tree.pop()
        assert item is not None
        served[item[0]] += item[1]
        left[item[0]] -= 1
        if left["a"] and left["b"]:
            assert abs(served["a"] - served["b"]) <= max(a) + max(b)


def test_ahead_is_exact_for_equal_costs_and_long_queues() -> None:
    tree: FairTree[str] = FairTree()
    for org, run in (("o1", "r1"), ("o2", "r1"), ("o2", "r2"), ("o3", "r1")):
        for n in range(10):
            tree.push(("m", org, run), f"{org}.{run}.{n}", 1)
    for _ in range(5):
        tree.pop()
    places = {item: tree.ahead(("m", *item.split(".")[:2]), lambda other, item=item: other == item) for item in tree}
    order = {item: place for place, item in enumerate(drain(tree))}
    for item, place in places.items():
        if order[item] <= 12:
            assert place == order[item], item


@given(st.lists(st.tuples(paths, st.integers(1, 5)), min_size=1, max_size=40))
def test_ahead_is_0_for_the_next_and_never_more_than_there_is(pushed: list[tuple[tuple[str, ...], int]]) -> None:
    tree: FairTree[int] = FairTree()
    for n, (path, cost) in enumerate(pushed):
        tree.push(path, n, cost)
    head = tree.peek()
    assert head is not None
    for n, (path, _) in enumerate(pushed):
        ahead = tree.ahead(path, lambda item, n=n: item == n)
        assert 0 <= ahead < len(pushed)
        assert (ahead == 0) == (n == head[0])
        assert tree.ahead(path, lambda item, n=n: item == n, most=3) <= 3
    assert tree.ahead(("elsewhere",), lambda item: True) == 0
