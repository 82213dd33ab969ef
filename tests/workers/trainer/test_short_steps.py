"""An optimizer step that finds no memory: idle runs make room, runs that share a call are split up, a run that finds
none waits. No step is taken by half, and no result shows any of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from scheduler.links.messages import Done, SetAside, TrainOp
from tests.workers.trainer.allocations import Allocations, Failing
from tests.workers.trainer.kit import Bench, arenas, ce_data, replayed
from tests.workers.trainer.test_out_of_memory import ERRORS, assert_equal_worlds
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder
from workers.trainer.steps import stepping
from workers.trainer.steps.adamw import Adam, HalfDone, Step, step_many
from workers.trainer.steps.dimuon import Dimuon, DimuonStep, step_dimuon


def sections(step: Step | DimuonStep) -> list[torch.Tensor]:
    return [step.weights, step.m, step.grad, *([step.v] if isinstance(step, Step) else [])]


def some_adams(decoder: Decoder) -> tuple[list[Step], Callable[[], object]]:
    """Steps of AdamW in two groups; the last gradient is so large that its norm needs float64."""
    settings = (Adam(1e-2, grad_clip_norm=0.5), Adam(1e-3, beta1=0.5), Adam(1e-2, grad_clip_norm=1.0))
    steps = []
    for seed, (adam, scale) in enumerate(zip(settings, (1, 1, 1e25), strict=True)):
        weights, m, grad = torch.randn(3, 500, generator=torch.Generator().manual_seed(seed))
        steps.append(Step(adam, weights, m, m.square(), grad * scale, 3))
    return steps, lambda: step_many(steps)


def a_dimuon(decoder: Decoder) -> tuple[list[DimuonStep], Callable[[], object]]:
    shape = AdapterShape(decoder.config, 4)
    weights, m, grad = (Adapter.init(shape, seed).flat.add_(0.01) for seed in range(3))
    step = DimuonStep(Dimuon(1e-2, grad_clip_norm=0.5), shape, weights, m, grad, 3)
    return [step], lambda: step_dimuon(step)


@pytest.mark.parametrize("some", [some_adams, a_dimuon])
def test_wherever_memory_runs_out_nothing_has_changed(
    decoder: Decoder, some: Callable[[Decoder], tuple[Sequence[Any], Callable[[], object]]]
) -> None:
    (undisturbed, update), (steps, again) = some(decoder), some(decoder)
    before, wanted = [x.clone() for step in steps for x in sections(step)], update()
    for first in itertools.count(1):
        with Allocations(first) as allocations:
            try:
                found = again()
                break
            except torch.OutOfMemoryError:
                assert allocations.refused
        for now, then in zip((x for step in steps for x in sections(step)), before, strict=True):
            assert torch.equal(now, then), first
    assert first > 5
    assert found == wanted
    for one, other in zip(steps, undisturbed, strict=True):
        assert all(map(torch.equal, sections(one), sections(other)))


#: Runs and their optimizers; d takes no step.
RUNS = {"a": "adamw", "b": "adamw", "c": "adamw", "d": "adamw", "e": "dimuon", "f": "dimuon"}
STEPPED = "abcef"


def with_gradients(bench: Bench) -> Bench:
    bench.ok(*(bench.create(run_id, optimizer=optimizer) for run_id, optimizer in RUNS.items()))
    bench.ok(*(bench.fb(run_id, ce_data([5, 3], seed)) for seed, run_id in enumerate(RUNS)))
    return bench


def steps_of(bench: Bench) -> list[TrainOp]:
    return [bench.dimuon(each) if RUNS[each] == "dimuon" else bench.optim(each) for each in STEPPED]


def waiting(bench: Bench, ops: Sequence[TrainOp], done: dict[str, Done]) -> list[TrainOp]:
    """The operations that must come again; checks that the run of each is as it was."""
    assert all(each.failure is None for each in done.values())
    left = [op for op in ops if op.op_id not in done]
    aside = [message for message in bench.sent if isinstance(message, SetAside)]
    assert [(each.run_id, each.lasting, each.kept) for each in aside] == [(op.run_id, False, True) for op in left]
    assert all("Cannot allocate memory" in each.reason for each in aside)
    return left


@pytest.mark.parametrize("refusals", [1, 2, 4, 9, 1 << 30])
def test_however_short_of_memory_every_run_steps_once(make_bench: Callable[..., Bench], refusals: int) -> None:
    ample, short = with_gradients(make_bench()), with_gradients(make_bench())
    waited = 0
    for first in (1, 2, 4, 7, 20, 90):
        ops = steps_of(ample)
        wanted = [(op.run_id, ample.ok(op)[op.op_id].payload) for op in ops]
        left = ops = steps_of(short)
        found = dict[str, Done]()
        with Allocations(first, refusals) as allocations:
            found |= short.go(*ops)
        assert allocations.refused
        left = waiting(short, ops, found)
        waited += len(left)
        found |= short.ok(*left)
        assert [(op.run_id, found[op.op_id].payload) for op in ops] == wanted
        assert_equal_worlds(short, ample, "".join(RUNS))
    assert bool(waited) is (refusals > 1)


class Scratch:
    """Memory for steps of at most so many runs in one call, while at most so many runs are in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bench: Bench, error: Exception = ERRORS[0]) -> None:
        self.runs = self.here = 99
        self.calls: list[str] = []
        real, residency = stepping._call, bench.trainer.residency

        def call(due: Any) -> Any:
            residency.settle()
            size_bytes = max(run.kind.size_bytes for run, *_ in due)
            if len(due) > self.runs or residency.size_bytes > self.here * size_bytes:
                raise error
            self.calls.append("".join(run.spec.run_id for run, *_ in due))
            return real(due)

        monkeypatch.setattr(stepping, "_call", call)


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "python"])
def test_a_call_is_split_no_further_than_needed(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Idle runs have made room by then."""
    ample, short = with_gradients(make_bench()), with_gradients(make_bench())
    ample.ok(*steps_of(ample))
    scratch = Scratch(monkeypatch, short, error)
    scratch.runs = 2
    short.ok(*steps_of(short))
    assert scratch.calls == ["a", "bc", "e", "f"]
    assert not short.trainer.residency.is_here("d")
    scratch.runs, scratch.here = 99, 1
    short.ok(*steps_of(short))
    assert scratch.calls[4:] == ["a", "b", "c", "e", "f"]
    monkeypatch.undo()
    ample.ok(*steps_of(ample))
    assert_equal_worlds(short, ample, "".join(RUNS))


def test_a_run_whose_step_finds_no_memory_waits_and_a_replay_is_rebuilt(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other operations in the pass wait with it; other runs go on."""
    ample, short = with_gradients(make_bench()), with_gradients(make_bench())
    for bench in (ample, short):
        step, behind, neighbour = bench.optim("a"), bench.fb("a", ce_data([4], 9)), bench.fb("b", ce_data([4], 9))
        if bench is short:
            scratch = Scratch(monkeypatch, bench)
            scratch.runs = 0
            before = [x.clone() for x in arenas(bench.run("a"))]
            assert set(bench.go(step, behind, neighbour)) == {neighbour.op_id}
            (aside,) = (message for message in bench.sent if isinstance(message, SetAside))
            assert (aside.run_id, aside.lasting, aside.kept) == ("a", False, True)
            assert all(map(torch.equal, arenas(bench.run("a")), before))
            scratch.runs = 99
            bench.ok(step, behind)
        else:
            bench.ok(step, behind, neighbour)
    assert_equal_worlds(short, ample)
    scratch.runs = 0
    assert short.go(replayed(short.optim("a"))) == {}
    (aside,) = (message for message in short.sent if isinstance(message, SetAside))
    assert (aside.run_id, aside.lasting, aside.kept) == ("a", False, False)
    assert "a" not in short.trainer.held.runs


@pytest.mark.parametrize(("run_id", "name"), [("a", "aten::_fused_adamw_"), ("e", "aten::sub_")])
def test_what_fails_as_runs_are_changed_is_not_tried_again(bench: Bench, run_id: str, name: str) -> None:
    """Also if the error says that memory is short, like that of a kernel that finds none at its launch."""
    with_gradients(bench)
    with (
        Failing(name, RuntimeError("CUDA error: out of memory")),
        pytest.raises(HalfDone, match="failed half way: RuntimeError"),
    ):
        bench.go(bench.dimuon(run_id) if RUNS[run_id] == "dimuon" else bench.optim(run_id))
