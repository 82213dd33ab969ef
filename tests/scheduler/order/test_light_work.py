"""Steps, saves, loads and creates have their price in the order of passes, and none fills the trainer for others."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from api.checks.adapter_sizes import sizes_of
from scheduler.links.messages import OpKind, RunSpec, TrainOp
from scheduler.order.compose import ALONG, compose
from scheduler.order.fair import FairTree
from scheduler.order.lanes import RunLane, Unit
from scheduler.order.light_work import CREATE_FROM, STEPS, WEIGHTS, Sizes, cost_of
from scheduler.order.operations import Operation
from scheduler.order.plans import BODY_ONLY, ForwardBackward, Slice
from workers.model.card import read_card
from workers.model.tiny import TINY_NAME, TINY_PATH
from workers.trainer.runs.state import kind_of

RESULTS = Path(__file__).parents[3] / "bench" / "results" / "light_work.json"
BUDGET = 4096
#: Of weft/tiny-moe with rank 128.
SIZES = Sizes(3_227_648, 987_136)

LIGHT = ("optim_step", "save_state", "save_sampler", "save_external", "load_state")


def spec(run: str, optimizer: str = "adamw", rank: int = 128) -> RunSpec:
    return RunSpec(run, "m", rank, 32.0, 0, True, True, True, optimizer)


class Queue:
    """A trainer's queue, and lanes that number what is pushed."""

    def __init__(self) -> None:
        self.tree: FairTree[Unit] = FairTree()
        self.lanes: dict[str, RunLane] = {}
        self.costs: dict[Unit, int] = {}

    def push(self, org: str, run: str, kind: str, tokens: int = 0, optimizer: str = "adamw") -> str:
        """Returns the operation's id."""
        if run not in self.lanes:
            self.lanes[run] = RunLane(org, spec(run, optimizer), next_seq=1)
            self.lanes[run].resident = True
        lane = self.lanes[run]
        plan = ForwardBackward((Slice(0, 1, tokens),)) if tokens else BODY_ONLY
        id = f"{run}-{lane.next_seq}"
        op = Operation(id, org, "s", run, lane.next_seq, kind, "m", tokens, "", plan, datetime.now(UTC))
        for unit in lane.arrive(op):
            self.costs[unit] = cost_of(unit, lane.spec, SIZES)
            self.tree.push(lane.path, unit, self.costs[unit])
        return id

    def compose(self, budget: int = BUDGET) -> list[Unit]:
        return compose(self.tree, ["m"], budget)


def test_the_constants_are_those_that_were_measured() -> None:
    measured = json.loads(RESULTS.read_text())["tokens"]
    ours = {"adamw step": STEPS["adamw"], "dimuon step": STEPS["dimuon"], "create_from": CREATE_FROM}
    ours |= {str(kind): weight for kind, weight in WEIGHTS.items()}
    assert set(ours) == set(measured)
    for name, weight in ours.items():
        found = measured[name]
        for rank in (8, 128):
            ratio = rank / 128 * SIZES.adapter / SIZES.base
            expected = found["fixed"] + (found["slope"] + found["turn"] * rank) * ratio
            assert weight.tokens(rank, Sizes(int(ratio * SIZES.base), SIZES.base)) == pytest.approx(expected, rel=0.35)


def test_sizes_are_those_of_the_model_and_the_trainers_adapter() -> None:
    card = read_card(TINY_NAME, TINY_PATH)
    run = RunSpec("r", TINY_NAME, 16, 32.0, 0, True, True, False)
    sizes = sizes_of({TINY_NAME: card})(run)
    assert sizes is not None
    assert sizes.adapter == kind_of(run, card.config).shape.num_parameters
    with (TINY_PATH / "config.json").open() as file:
        raw = json.load(file)
    attention = 2 * raw["head_dim"] * (raw["num_attention_heads"] + raw["num_key_value_heads"])
    experts = 3 * raw["num_experts_per_tok"] * raw["moe_intermediate_size"]
    by_hand = raw["num_hidden_layers"] * (attention + experts + (raw.get("num_experts") or raw["num_local_experts"]))
    assert sizes.base == raw["hidden_size"] * (by_hand + raw["vocab_size"])
    assert sizes_of({TINY_NAME: card})(spec("r")) is None


def test_a_larger_run_costs_more_and_dimuon_more_than_adamw() -> None:
    def cost(kind: str, optimizer: str = "adamw", rank: int = 128) -> int:
        queue = Queue()
        queue.lanes["r"] = RunLane("o", spec("r", optimizer, rank), next_seq=1)
        queue.lanes["r"].resident = True
        queue.push("o", "r", kind)
        return next(iter(queue.costs.values()))

    assert cost("optim_step") < cost("save_sampler") < cost("save_state") < cost("load_state")
    assert cost("optim_step", "dimuon") > 20 * cost("optim_step")
    assert cost("optim_step", "dimuon", 8) < cost("optim_step", "dimuon", 128)


def test_a_create_from_saved_weights_costs_as_much_as_a_load() -> None:
    """And of a run whose size is not known only the fixed part counts."""
    new, saved = (Unit(None, "m", TrainOp("op", "r", 0, OpKind.CREATE, source_ref=ref), 0) for ref in ("", "weights/a"))
    load = Unit(None, "m", TrainOp("op", "r", 0, OpKind.LOAD_STATE, source_ref="weights/a"), 0)
    assert cost_of(saved, spec("r"), SIZES) > cost_of(load, spec("r"), SIZES) > 5 * cost_of(new, spec("r"), SIZES)
    assert [cost_of(unit, spec("r"), None) for unit in (new, load, saved)] == [7, 25, 14]


def test_steps_of_many_runs_hold_a_neighbour_for_one_pass() -> None:
    """8 runs with 399 dimuon steps each, of rank 128: 800 seconds of work."""
    queue = Queue()
    for run in range(8):
        for _ in range(399):
            queue.push("attacker", f"a{run}", "optim_step", optimizer="dimuon")
    first = queue.compose()
    assert 0 < sum(queue.costs[unit] for unit in first) <= BUDGET * (1 + ALONG)
    mine = queue.push("neighbour", "n", "forward_backward", 200)
    assert mine in {unit.send.op_id for unit in queue.compose()}


work = st.one_of(st.sampled_from(LIGHT).map(lambda kind: (kind, 0)), st.integers(1, 1500).map(lambda n: ("forward", n)))


@given(
    flood=st.lists(st.tuples(st.integers(0, 9), work, st.sampled_from(["adamw", "dimuon"])), min_size=1, max_size=80),
    passes=st.integers(0, 4),
    mine=work,
)
def test_whatever_one_organisation_floods_with_a_newcomer_is_in_the_next_pass(
    flood: list[tuple[int, tuple[str, int], str]], passes: int, mine: tuple[str, int]
) -> None:
    queue = Queue()
    for run, (kind, tokens), optimizer in flood:
        queue.push("flood", f"{optimizer}{run}", kind, tokens, optimizer)
    for _ in range(passes):
        queue.compose()
    id = queue.push("newcomer", "new", *mine)
    assert id in {unit.send.op_id for unit in queue.compose()}


@given(
    works=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), work), min_size=1, max_size=80),
    budget=st.integers(50, BUDGET),
)
def test_a_pass_counts_no_more_than_its_budget_and_a_little(
    works: list[tuple[int, int, tuple[str, int]]], budget: int
) -> None:
    queue = Queue()
    for org, run, (kind, tokens) in works:
        queue.push(f"o{org}", f"o{org}-r{run}", kind, tokens)
    got: list[str] = []
    while taken := queue.compose(budget):
        costs = [queue.costs[unit] for unit in taken]
        assert sum(costs) <= max(budget, costs[0]) + budget * ALONG
        got += [unit.send.op_id for unit in taken]
    assert sorted(got) == sorted(unit.send.op_id for unit in queue.costs)


@given(st.lists(work, min_size=12, max_size=40), st.lists(work, min_size=12, max_size=40), st.integers(200, BUDGET))
def test_two_that_are_always_busy_are_served_alike_whatever_their_work_is(
    one: list[tuple[str, int]], other: list[tuple[str, int]], budget: int
) -> None:
    """Apart from one unit of each, as with tokens: one pass may be filled by either."""
    queue = Queue()
    for org, works in (("one", one), ("other", other)):
        for place, (kind, tokens) in enumerate(works):
            queue.push(org, f"{org}{place % 3}", kind, tokens)
    left = {org: sum(cost for unit, cost in queue.costs.items() if unit.op and unit.op.org_id == org)
            for org in ("one", "other")}  # fmt: skip
    served = {"one": 0, "other": 0}
    largest = max(queue.costs.values())
    while taken := queue.compose(budget):
        for unit in taken:
            assert unit.op is not None
            served[unit.op.org_id] += queue.costs[unit]
        if any(served[org] == left[org] for org in served):
            break
        assert abs(served["one"] - served["other"]) <= 2 * largest + budget * (1 + ALONG)


def test_no_kind_of_work_is_free() -> None:
    for kind in OpKind:
        queue = Queue()
        queue.push("o", "r", kind, 1 if kind in (OpKind.FORWARD, OpKind.FORWARD_BACKWARD) else 0)
        assert all(cost > 0 for cost in queue.costs.values())
        assert kind in (OpKind.FORWARD, OpKind.FORWARD_BACKWARD) or next(iter(queue.costs.values())) > 20
