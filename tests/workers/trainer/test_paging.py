"""Runs that are paged out and in have the bits of runs that always stay, whatever is in the memory they get."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule, run_state_machine_as_test

from scheduler.links.messages import OpKind, Pass, TrainOp
from tests.search import examples
from tests.workers.trainer.kit import MODEL, Bench, arenas, ce_data, run_spec, sliced
from workers.model.decoder import Decoder
from workers.trainer.runs.arena import Arena, Arenas
from workers.trainer.runs.residency import waves
from workers.trainer.runs.state import kind_of

MakeBench = Callable[..., Bench]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill each arena with NaN when it changes hands: a run that read any of it would show it."""

    def filled(arena: Arena) -> Arena:
        arena.flat.fill_(math.nan)
        return arena

    take = Arenas.take
    monkeypatch.setattr(Arenas, "take", lambda self, kind: filled(take(self, kind)))


def size_of(decoder: Decoder, rank: int = 4, optimizer: str = "adamw") -> int:
    return kind_of(run_spec("any", rank, optimizer=optimizer), decoder.config).size_bytes


def assert_same(paged: Bench, whole: Bench, run_id: str) -> None:
    one, other = paged.run(run_id), whole.run(run_id)
    for x, y in zip(arenas(one), arenas(other), strict=True):
        assert torch.equal(x, y), run_id
    assert (one.step, one.last_seq, one.has_grad) == (other.step, other.last_seq, other.has_grad)
    if one.grad is not None and other.grad is not None:
        assert torch.equal(one.grad.flat, other.grad.flat), run_id


def some_work(bench: Bench, run_id: str, optimizer: str, rng: random.Random) -> list[TrainOp]:
    """One visit to a run: it trains, accumulates a gradient for later, or is only read."""
    data = ce_data([rng.randint(1, 6)], seed=rng.randrange(10**6))
    step = bench.dimuon if optimizer == "dimuon" else bench.optim
    match rng.randrange(4):
        case 0:
            return [bench.fb(run_id, data), step(run_id, learning_rate=rng.choice([0.01, 0.02]))]
        case 1:
            return [bench.fb(run_id, data)]
        case 2:
            return [step(run_id)]
    return [bench.fb(run_id, data, kind=OpKind.FORWARD), bench.fb(run_id, data), bench.fb(run_id, data)]


def test_a_thousand_runs_with_memory_for_64(make_bench: MakeBench, decoder: Decoder) -> None:
    paged, whole = make_bench(resident_bytes=64 * size_of(decoder)), make_bench()
    rng = random.Random(4)
    runs = {f"r{i}": {"rank": 4 if i % 5 else 2, "optimizer": "dimuon" if i % 7 == 0 else "adamw"} for i in range(1000)}
    compared = {run_id for run_id in runs if rng.random() < 0.1}
    names = list(runs)
    for first in range(0, 1000, 50):
        paged.ok(*(paged.create(run_id, **runs[run_id]) for run_id in names[first : first + 50]))
    whole.ok(*(whole.create(run_id, **runs[run_id]) for run_id in sorted(compared)))
    residency = paged.trainer.residency
    often = sorted(compared)[:60] + rng.sample(names, 40)
    for number in range(40):
        drawn = rng.sample(often if number % 2 else names, 16)
        for bench in (paged, whole):
            visits = random.Random(number)
            works = {run_id: some_work(bench, run_id, runs[run_id]["optimizer"], visits) for run_id in drawn}
            ops = [op for run_id, work in works.items() if bench is paged or run_id in compared for op in work]
            bench.ok(*ops)
    for run_id in sorted(compared):
        assert_same(paged, whole, run_id)
    assert len(paged.trainer.held.runs) == 1000
    assert residency.peak_bytes <= residency.budget_bytes
    assert residency.page_ins > 500
    assert residency.write_backs < residency.page_outs
    assert whole.trainer.residency.page_outs == 0


def test_an_accumulated_gradient_and_an_open_operation_are_paged(make_bench: MakeBench) -> None:
    """Also both at once, when the open operation's gradient has an arena of its own."""
    paged, whole = make_bench(resident_bytes=1), make_bench()
    for bench in (paged, whole):
        bench.ok(bench.create("a"), bench.create("d", optimizer="dimuon"))
        bench.ok(bench.fb("a", ce_data([5], 1)), bench.fb("d", ce_data([4], 2)))
        for run_id in "ad":
            first, second, last = sliced(bench.fb(run_id, ce_data([3, 5, 4], 3)), 1, 2)
            for part in (first, second, last):
                bench.ok(part, bench.create(f"other{part.start}{run_id}", 8))
        bench.ok(bench.create("b"), bench.create("c"))
    assert_same(paged, whole, "a")
    assert_same(paged, whole, "d")
    for bench in (paged, whole):
        bench.ok(bench.optim("a"), bench.dimuon("d"))
    assert_same(paged, whole, "a")
    assert_same(paged, whole, "d")


def test_a_clean_run_is_not_written_again(make_bench: MakeBench) -> None:
    bench = make_bench(resident_bytes=1)
    bench.ok(bench.create("a"), bench.create("b"))
    residency = bench.trainer.residency
    written = residency.write_backs
    for run_id in "abab":
        bench.ok(bench.fb(run_id, ce_data([3], 1), kind=OpKind.FORWARD))
    assert residency.write_backs <= written + 1  # b had not been written yet
    assert residency.page_ins >= 4


def test_an_operation_that_fails_leaves_nothing_in_a_page(make_bench: MakeBench) -> None:
    bench = make_bench(resident_bytes=1)
    bench.ok(bench.create("a"), bench.create("b"))
    bad = ce_data([4, 4], 1)
    bad[1].inputs["weights"][:] = 3e38
    first, last = sliced(bench.fb("a", bad), 1)
    bench.go(first)
    bench.ok(bench.fb("b", ce_data([3], 1)))
    assert bench.go(last)[last.op_id].failure is not None
    bench.ok(bench.fb("b", ce_data([3], 1)))
    assert bench.run("a").grad is None
    bench.ok(bench.optim("a", knows=last.seq))
    assert torch.isfinite(bench.run("a").adapter.flat).all()


def test_pages_are_deleted_with_their_run(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(resident_bytes=1)
    bench.ok(*(bench.create(run_id) for run_id in "abcd"))
    bench.trainer.residency.settle()
    folder = tmp_path / "world0-pages"
    assert len(list(folder.iterdir())) == 3
    bench.go(release=["a", "b", "c", "d"])
    bench.trainer.residency.settle()
    assert list(folder.iterdir()) == []


def test_a_full_disk_loses_nothing(make_bench: MakeBench, tmp_path: Path) -> None:
    paged, whole = make_bench(resident_bytes=1), make_bench()
    folder = tmp_path / "world0-pages"
    folder.write_text("where a folder should be")
    for bench in (paged, whole):
        bench.ok(bench.create("a"), bench.create("b"), bench.create("c"))
        bench.ok(bench.fb("a", ce_data([5], 1)))
        bench.ok(bench.fb("b", ce_data([5], 1)), bench.optim("a"))
        if bench is paged:
            folder.unlink()
        bench.ok(bench.optim("b"), bench.fb("c", ce_data([5], 1)))
    for run_id in "abc":
        assert_same(paged, whole, run_id)


def test_a_run_that_leaves_before_it_could_be_paged_out_leaves_its_memory(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    bench = make_bench(resident_bytes=1)
    (tmp_path / "world0-pages").write_text("where a folder should be")
    bench.ok(bench.create("a"), bench.create("b"), bench.create("c"))
    bench.go(release=["a", "b", "c"])
    bench.trainer.residency.squeeze()
    assert bench.trainer.residency.size_bytes == 0


def test_a_lost_page_takes_the_trainer_with_it(make_bench: MakeBench, tmp_path: Path) -> None:
    """The journal rebuilds the run on the next one; nothing else could."""
    bench = make_bench(resident_bytes=1)
    bench.ok(bench.create("a"), bench.create("b"))
    bench.trainer.residency.settle()
    shutil.rmtree(tmp_path / "world0-pages")
    with pytest.raises(RuntimeError, match="page of run a cannot be read"):
        bench.go(bench.fb("a", ce_data([3], 1)))


def test_drain_snapshots_what_is_paged_out(make_bench: MakeBench) -> None:
    bench = make_bench(resident_bytes=1)
    bench.ok(*(bench.create(run_id) for run_id in "abc"))
    bench.ok(*(op for run_id in "abc" for op in (bench.fb(run_id, ce_data([3], 1)), bench.optim(run_id))))
    sent: list[msgspec.Struct] = []
    bench.trainer.drain(sent.append)
    assert sorted(snapshot.run_id for snapshot in sent) == ["a", "b", "c"]  # type: ignore[attr-defined]


def test_waves_fit_and_keep_the_order() -> None:
    assert waves({}, 10) == []
    assert waves({"a": 4, "b": 6}, 10) == [["a", "b"]]
    assert waves({"a": 2, "b": 3, "c": 4, "d": 9, "e": 1}, 10) == [["a", "b"], ["c"], ["d"], ["e"]]


class World(RuleBasedStateMachine):
    """Two trainers with the same work, one of which has memory for two runs."""

    make_bench: MakeBench
    size_bytes: int
    runs = Bundle("runs")

    @initialize()
    def start(self) -> None:
        self.paged, self.whole = self.make_bench(resident_bytes=2 * self.size_bytes), self.make_bench()
        self.count = 0
        self.saved = 0
        self.optimizers: dict[str, str] = {}
        self.slices: dict[str, list[tuple[TrainOp, TrainOp]]] = {}

    def both(self, make: Callable[[Bench], list[TrainOp]]) -> None:
        for bench in (self.paged, self.whole):
            bench.ok(*make(bench))

    def finish(self, run_id: str) -> None:
        """Finish a begun operation before the next one."""
        for paged, whole in self.slices.pop(run_id, []):
            self.paged.ok(paged)
            self.whole.ok(whole)

    @rule(target=runs, rank=st.sampled_from([2, 4]), optimizer=st.sampled_from(["adamw", "dimuon"]))
    def create(self, rank: int, optimizer: str) -> str:
        self.count += 1
        run_id = f"r{self.count}"
        self.optimizers[run_id] = optimizer
        self.both(lambda bench: [bench.create(run_id, rank, optimizer=optimizer)])
        return run_id

    @rule(chosen=st.lists(runs, min_size=1, max_size=3, unique=True), seed=st.integers(0, 99))
    def gather(self, chosen: list[str], seed: int) -> None:
        for run_id in chosen:
            self.finish(run_id)
        self.both(lambda bench: [bench.fb(run_id, ce_data([3, 2], seed)) for run_id in chosen])

    @rule(run_id=runs, seed=st.integers(0, 99))
    def begin(self, run_id: str, seed: int) -> None:
        self.finish(run_id)
        parts = [sliced(bench.fb(run_id, ce_data([3, 2, 4], seed)), 1, 2) for bench in (self.paged, self.whole)]
        self.slices[run_id] = list(zip(*parts, strict=True))

    @rule(run_id=runs)
    def go_on(self, run_id: str) -> None:
        if self.slices.get(run_id):
            paged, whole = self.slices[run_id].pop(0)
            self.paged.ok(paged)
            self.whole.ok(whole)

    @rule(chosen=st.lists(runs, min_size=1, max_size=4, unique=True))
    def step(self, chosen: list[str]) -> None:
        for run_id in chosen:
            self.finish(run_id)
        self.both(
            lambda bench: [
                (bench.dimuon if self.optimizers[run_id] == "dimuon" else bench.optim)(run_id) for run_id in chosen
            ]
        )

    @rule(run_id=runs)
    def save_and_load(self, run_id: str) -> None:
        self.finish(run_id)
        self.saved += 1
        ref = f"w/{self.saved}"
        self.both(
            lambda bench: [
                bench.op(run_id, OpKind.SAVE_STATE, target_ref=ref),
                bench.op(run_id, OpKind.LOAD_STATE, source_ref=ref, with_optimizer=True),
            ]
        )

    @rule(run_id=consumes(runs))
    def release(self, run_id: str) -> None:
        self.slices.pop(run_id, None)
        for bench in (self.paged, self.whole):
            bench.go(release=[run_id])
        del self.optimizers[run_id]

    @rule(run_id=runs)
    def compare(self, run_id: str) -> None:
        self.finish(run_id)
        assert_same(self.paged, self.whole, run_id)

    def teardown(self) -> None:
        for run_id in getattr(self, "optimizers", {}):
            self.compare(run_id)
        if hasattr(self, "paged"):
            assert set(self.paged.trainer.held.runs) == set(self.optimizers)
            self.paged.go(release=[*self.optimizers])
            self.paged.trainer.residency.squeeze()
            assert self.paged.trainer.residency.size_bytes == 0


@pytest.mark.search
def test_any_order_of_work(decoder: Decoder, tmp_path: Path) -> None:
    count = iter(range(10**6))
    World.make_bench = staticmethod(lambda **given: Bench(decoder, tmp_path / f"world{next(count)}", **given))
    World.size_bytes = size_of(decoder)
    run_state_machine_as_test(
        World,
        settings=settings(
            max_examples=examples(6), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_runs_that_are_next_in_the_queue_come_in_while_others_compute(make_bench: MakeBench, decoder: Decoder) -> None:
    bench = make_bench(resident_bytes=2 * size_of(decoder))
    bench.ok(*(bench.create(run_id) for run_id in "abcd"))
    here = bench.trainer.residency.is_here
    assert [here(run_id) for run_id in "abcd"] == [False, False, True, True]
    op = bench.fb("a", ce_data([4], 1))
    bench.trainer.execute(Pass(1, MODEL, [op], soon=["never seen", "b", "c"]), lambda *told: None)
    assert [here(run_id) for run_id in "abcd"] == [True, True, False, False]
