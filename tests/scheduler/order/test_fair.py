"""Start-time fair queueing: order, weights, priorities, corrections, the fairness bound, and no lost items."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from scheduler.links.contract import PRIORITY_SHARES
from scheduler.order.fair import LAG, FairTree


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


costs = st.lists(st.integers(1, 40), min_size=5, max_size=60)
weights = st.integers(1, 20)


@given(st.lists(st.tuples(costs, weights), min_size=3, max_size=3))
def test_weighted_service_differs_by_at_most_the_largest_items(flows: list[tuple[list[int], int]]) -> None:
    tree: FairTree[tuple[int, int]] = FairTree()
    for n, (mine, weight) in enumerate(flows):
        for cost in mine:
            tree.push(("m", str(n), "batch", "r"), (n, cost), cost, weight=weight)
    served, left = [0, 0, 0], [len(mine) for mine, _ in flows]
    while (item := tree.pop()) is not None:
        served[item[0]] += item[1]
        left[item[0]] -= 1
        ready = [n for n in range(3) if left[n]]
        for i in ready:
            for j in ready:
                gap = abs(served[i] / flows[i][1] - served[j] / flows[j][1])
                assert gap <= max(flows[i][0]) / flows[i][1] + max(flows[j][0]) / flows[j][1] + 1e-9


def test_weights_are_shares() -> None:
    tree: FairTree[str] = FairTree()
    for _ in range(100):
        for org, weight in (("one", 1), ("three", 3)):
            tree.push(("m", org, "interactive", "r"), org, 10, weight=weight)
    first = [tree.pop() for _ in range(80)]
    assert first.count("three") == 60


def test_a_weight_that_changes_holds_from_the_next_item_on() -> None:
    tree: FairTree[str] = FairTree()
    for weight in (1, 1, 4):
        for org in ("fixed", "grows"):
            tree.push(("m", org, "batch", "r"), org, 8, weight=weight if org == "grows" else 1)
    for _ in range(50):
        for org in ("fixed", "grows"):
            tree.push(("m", org, "batch", "r"), org, 8, weight=4 if org == "grows" else 1)
    assert [tree.pop() for _ in range(50)].count("grows") == 40


def test_interactive_goes_before_batch_of_its_own_organisation_only() -> None:
    tree: FairTree[str] = FairTree()
    for n in range(3):
        tree.push(("m", "a", "batch", "r"), f"a-batch{n}", 10)
        tree.push(("m", "b", "batch", "r"), f"b-batch{n}", 10)
    assert [tree.pop(), tree.pop()] == ["a-batch0", "b-batch0"]
    for n in range(3):
        tree.push(("m", "a", "interactive", "r"), f"a-fast{n}", 10)
    order = drain(tree)
    assert [item for item in order if item.startswith("a")] == ["a-fast0", "a-fast1", "a-fast2", "a-batch1", "a-batch2"]
    assert order.index("b-batch1") <= 1


@given(st.integers(1, 50), st.integers(1, 50))
def test_a_flood_of_interactive_work_cannot_starve_batch(batch: int, interactive: int) -> None:
    tree: FairTree[int] = FairTree()
    for _ in range(3):
        tree.push(("m", "a", "batch", "eval"), 0, batch)
    served, waited, batches = 0, 0, 0
    for _ in range(60):
        tree.push(("m", "a", "interactive", "chat"), interactive, interactive)
    while batches < 3 and (cost := tree.pop()) is not None:
        tree.push(("m", "a", "interactive", "chat"), interactive, interactive)
        if cost:
            waited += cost
            assert waited <= PRIORITY_SHARES["interactive"] * batch + interactive
        else:
            batches, waited = batches + 1, 0
        served += 1
    assert batches == 3


def test_a_correction_gives_back_what_was_not_used() -> None:
    tree: FairTree[str] = FairTree()
    for n in range(4):
        tree.push(("m", "brief", "batch", "r"), f"brief{n}", 100)
        tree.push(("m", "wordy", "batch", "r"), f"wordy{n}", 100)
    assert [tree.pop(), tree.pop()] == ["brief0", "wordy0"]
    for n in (1, 2, 3):
        tree.correct(("m", "brief", "batch", "r"), -90)
        assert tree.pop() == f"brief{n}"


def test_a_correction_of_a_lone_flow_is_no_credit_against_a_newcomer() -> None:
    tree: FairTree[str] = FairTree()
    for n in range(40):
        tree.push(("m", "lone", "batch", "r"), f"lone{n}", 1000)
    for _ in range(20):
        tree.pop()
        tree.correct(("m", "lone", "batch", "r"), -999)
    for n in range(2):
        tree.push(("m", "late", "batch", "r"), f"late{n}", 1000)
    assert "late0" in drain(tree)[:2]


def test_a_correction_of_what_is_forgotten_or_unknown_changes_nothing() -> None:
    tree: FairTree[str] = FairTree()
    tree.correct(("m", "nobody", "batch", "r"), 100)
    tree.push(("m", "a", "batch", "r"), "a", 1)
    assert drain(tree) == ["a"]


#: What an item is charged when it is taken, and what it has used when it ends, some items later.
estimated = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=5, max_size=60)


@given(estimated, estimated, weights, weights, st.integers(1, 6))
def test_with_estimates_the_bound_grows_by_their_error_in_flight(
    a: list[tuple[int, int]], b: list[tuple[int, int]], weight_a: int, weight_b: int, slots: int
) -> None:
    flows, weight = {"a": a, "b": b}, {"a": weight_a, "b": weight_b}
    tree: FairTree[tuple[str, int, int]] = FairTree()
    for key, items in flows.items():
        for cost, used in items:
            tree.push(("m", key, "batch", "r"), (key, cost, used), cost, weight=weight[key])
    charged, left = {"a": 0.0, "b": 0.0}, {"a": len(a), "b": len(b)}
    flying: list[tuple[str, int, int]] = []
    errors = {key: slots * max(abs(cost - used) for cost, used in items) for key, items in flows.items()}
    bound = sum((max(cost for cost, _ in items) + errors[key]) / weight[key] for key, items in flows.items())
    while left["a"] and left["b"]:
        if len(flying) == slots:
            key, cost, used = flying.pop(0)
            tree.correct(("m", key, "batch", "r"), used - cost)
            charged[key] += (used - cost) / weight[key]
        item = tree.pop()
        assert item is not None
        flying.append(item)
        left[item[0]] -= 1
        charged[item[0]] += item[1] / weight[item[0]]
        if left["a"] and left["b"]:
            assert abs(charged["a"] - charged["b"]) <= bound + 1e-6


def test_a_lone_request_is_never_held() -> None:
    tree: FairTree[str] = FairTree()
    for n in range(50):
        tree.push(("m", "a", "batch", "r"), f"{n}", 10_000)
        tree.correct(("m", "a", "batch", "r"), 10**9)
        assert tree.pop(("m",)) == f"{n}"


#: The runs of each organisation that each of two trainers holds; a and b have one on each.
HOMES = {"a": {"a1": 0, "a2": 1}, "b": {"b1": 0, "b2": 1}, "c": {"c1": 1}}


@given(
    st.lists(st.integers(1, 40), min_size=40, max_size=40),
    st.lists(st.integers(0, 1), min_size=20, max_size=120),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_over_several_trainers_the_sums_of_two_that_have_work_for_each_differ_by_one_item_each(
    costs: list[int], turns: list[int], weights: tuple[int, int]
) -> None:
    """Whichever trainer comes, however often, and whatever a third one has for only one of the two."""
    weight = dict(zip("abc", (*weights, 1), strict=True))
    tree: FairTree[tuple[str, int]] = FairTree()
    for org, homes in HOMES.items():
        for run in homes:
            for n in range(len(turns)):
                cost = costs[n % len(costs)]
                tree.push(("m", org, "interactive", run), (org, cost), cost, weight=weight[org])
    served = dict.fromkeys(HOMES, 0)
    for trainer in turns:
        item = tree.pop(("m",), lambda run, t=trainer: HOMES[run[0]][run] == t)  # type: ignore[misc]
        assert item is not None
        served[item[0]] += item[1]
        largest = max(costs)
        apart = abs(served["a"] / weight["a"] - served["b"] / weight["b"])
        assert apart <= largest / weight["a"] + largest / weight["b"]


@settings(max_examples=40)
@given(st.integers(1, 50), st.sampled_from([1, 100, LAG // 20, LAG // 7]))
def test_who_can_be_served_by_one_trainer_only_is_first_there_until_the_sums_are_equal(first: int, cost: int) -> None:
    """b was served alone by a trainer on which a has no run: a catches up where it can be served, but by no more than
    LAG, so that nobody who comes later waits for it either."""
    tree: FairTree[str] = FairTree()
    for _ in range(120):
        tree.push(("m", "a", "p", "a1"), "a", cost)
        tree.push(("m", "b", "p", "b2"), "b", cost)
        tree.push(("m", "b", "p", "b1"), "b", cost)
    for _ in range(first):
        assert tree.pop(("m",), lambda run: run == "b2") == "b"
    ahead = 0
    while tree.pop(("m",), lambda run: run in ("a1", "b1")) == "a":
        ahead += cost
    assert min(first * cost, LAG) - cost <= ahead <= min(first * cost, LAG) + 2 * cost


def test_a_newcomer_waits_for_nobody_who_was_served_elsewhere() -> None:
    tree: FairTree[str] = FairTree()
    tree.push(("m", "slow", "p", "s"), "slow", 10)
    for _ in range(300):
        tree.push(("m", "fast", "p", "f"), "fast", LAG // 10)
        assert tree.pop(("m",), lambda run: run == "f") == "fast"
    tree.push(("m", "fast", "p", "f"), "fast", LAG // 10)
    for _ in range(30):
        tree.push(("m", "new", "p", "n"), "new", LAG // 10)
    taken = [tree.pop(("m",), lambda run: run != "s") for _ in range(20)]
    assert taken.index("fast") <= 13  # about one LAG, not thirty


def test_an_item_is_taken_out_wherever_it_stands() -> None:
    queue: FairTree[str] = FairTree()
    for item in ("a1", "a2", "a3"):
        queue.push(("m", "x", "batch", "a"), item, 10)
    queue.push(("m", "y", "batch", "b"), "b1", 10)
    assert not queue.discard(("m", "x", "batch", "a"), "b1")
    assert not queue.discard(("m", "x", "batch", "none"), "a1")
    assert queue.discard(("m", "x", "batch", "a"), "a2")
    assert not queue.discard(("m", "x", "batch", "a"), "a2")
    assert queue.queued(("m", "x", "batch", "a")) == 20
    assert queue.peek(("m", "x", "batch", "a")) == ("a1", 10)
    assert queue.discard(("m", "y", "batch", "b"), "b1")
    assert queue.children(("m",)) == ["x"]
    assert queue.children(("m", "y")) == []
    assert queue.peek(("m", "y", "batch", "b")) is None
    assert queue.peek(("m", "none")) is None
    assert [queue.pop(), queue.pop(), queue.pop()] == ["a1", "a3", None]


def test_what_leaves_one_branch_leaves_the_others_alone() -> None:
    queue: FairTree[str] = FairTree()
    for org in ("x", "y"):
        for run in ("1", "2"):
            queue.push(("m", org, "batch", org + run), org + run, 10)
    assert queue.remove(("m", "x", "batch", "x1")) == ["x1"]
    assert queue.remove(("m", "x", "batch", "x1")) == []
    assert queue.children(("m", "x", "batch")) == ["x2"]
    assert queue.remove(("m", "x", "batch", "x2")) == ["x2"]
    assert queue.children() == ["m"]
    assert queue.children(("m",)) == ["y"]
    assert [queue.pop(), queue.pop(), queue.pop()] == ["y1", "y2", None]
    queue.push(("m", "x", "batch", "x1"), "again", 10)
    assert queue.pop() == "again"


def test_who_comes_and_goes_is_forgotten_but_not_what_is_owed() -> None:
    """Thousands of organisations with one item each are forgotten; one that had more than its turn is not."""
    queue: FairTree[int] = FairTree()
    queue.push(("m", "greedy", "batch", "g"), -1, 1_000_000)
    queue.push(("m", "steady", "batch", "s"), 0, 1)
    assert queue.pop() == -1
    for number in range(1, 3000):
        queue.push(("m", "steady", "batch", "s"), number, 1)
        queue.push(("m", f"guest {number}", "batch", "r"), -number, 1)
    served = [queue.pop() for _ in range(5999)]
    assert None not in served
    model = queue._find(("m",))
    assert model is not None
    assert len(model.children) < 200
    queue.push(("m", "greedy", "batch", "g"), -2, 1)
    queue.push(("m", "newcomer", "batch", "n"), -3, 1)
    assert queue.pop() == -3, "what was a million tokens ahead is not forgotten"


def test_a_correction_backwards_takes_those_along_who_wait_for_a_first_turn() -> None:
    queue: FairTree[str] = FairTree()
    path = ("m", "x", "batch", "a")
    for item in ("a1", "a2"):
        queue.push(path, item, 100)
    queue.push(("m", "y", "batch", "b"), "b0", 10)
    assert queue.pop() == "a1"
    assert queue.pop() == "b0"
    queue.push(("m", "z", "batch", "c"), "c1", 10)  # its first turn is now
    queue.correct(path, -100)  # `a` has used nothing
    assert queue.pop() == "c1"
    assert queue.pop() == "a2"


def test_of_equals_the_corrected_one_is_last() -> None:
    tree: FairTree[str] = FairTree()
    for org in "ab":
        for n in range(2):
            tree.push((org,), f"{org}{n}", 10)
    assert [tree.pop(), tree.pop()] == ["a0", "b0"]  # `b` came in last, and stands where `a` does
    for tokens in (5, -5):
        tree.correct(("a",), tokens)
    assert drain(tree) == ["b1", "a1"]


def test_flows_and_items_are_known_by_what_they_say() -> None:
    """Paths and items come from messages and rows: they are equal, but never the same object."""

    def anew(*words: str) -> tuple[str, ...]:
        return tuple("".join(list(word)) for word in words)

    tree: FairTree[tuple[str, ...]] = FairTree()
    for org in ("acme", "rival"):
        for item in ("first", "second", "third"):
            tree.push(anew("model", org, "batch", "run"), anew(org, item), 10)
    for org in ("acme", "rival"):
        assert tree.pop(anew("model", org)) == (org, "first")
    tree.correct(anew("model", "rival", "batch", "run"), -5)
    assert tree.pop() == ("rival", "second")
    assert tree.discard(anew("model", "rival", "batch", "run"), anew("rival", "third"))
    assert drain(tree, anew("model")) == [("acme", item) for item in ("second", "third")]  # type: ignore[comparison-overlap,arg-type]


def test_nothing_is_ahead_of_what_is_not_there() -> None:
    tree: FairTree[str] = FairTree()
    tree.push(("m", "a", "r"), "a0", 10)
    tree.push(("m", "b", "r"), "b0", 10)
    tree.remove(("m", "b", "r"))
    for path in (("m", "b", "r"), ("m", "c", "r"), ("m", "a", "other")):
        assert tree.ahead(path, lambda item: True) == 0
