"""A pass that runs out of memory is computed in smaller pieces, and nobody can tell from the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from scheduler.links.messages import OpKind, SetAside
from tests.workers.trainer.kit import Bench, arenas, ce_data, replayed, restore, rl_data, sliced
from workers.model.adapters.adapter import Adapter
from workers.model.memory import is_out_of_memory
from workers.trainer import computing
from workers.trainer.microbatch import run_microbatch
from workers.trainer.runs import arena as runs_arena

ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    MemoryError(),
)


class Allocator:
    """Raises half way through the backward of anything above `most_tokens`: gradients are spoilt by then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_tokens: int, error: Exception = ERRORS[0]) -> None:
        self.computed: list[int] = []
        self.refused = 0

        def run(decoder: Any, parts: Any, *, trains: bool) -> None:
            tokens = sum(part.tokens for part in parts)
            if tokens > most_tokens:
                self.refused += 1
                for part in parts:
                    if part.progress.grad is not None:
                        part.progress.grad.flat.add_(1.0)
                raise error
            self.computed.append(tokens)
            run_microbatch(decoder, parts, trains=trains)

        monkeypatch.setattr(computing, "run_microbatch", run)


def a_pass(bench: Bench) -> dict[str, bytes]:
    """Three runs with a few slices each, and a forward; returns the results in order."""
    bench.ok(*(bench.create(run_id) for run_id in "abc"))
    first, *rest = sliced(bench.fb("a", ce_data([20, 9, 14, 3, 8], 1)), 1, 2, 3, 4)
    bench.ok(first)
    ops = [*rest, bench.fb("b", rl_data([11, 5], 2), "ppo"), bench.fb("c", ce_data([6, 6, 6], 3)), bench.optim("a")]
    done = bench.ok(*ops, bench.optim("b"), bench.optim("c"))
    return {op.run_id + op.kind: done[op.op_id].payload for op in ops if op.final}


def assert_equal_worlds(one: Bench, other: Bench, runs: str = "abc") -> None:
    for run_id in runs:
        for x, y in zip(arenas(one.run(run_id)), arenas(other.run(run_id)), strict=True):
            assert torch.equal(x, y), run_id


@pytest.mark.parametrize("most_tokens", [20, 30, 50])
@pytest.mark.parametrize("error", ERRORS, ids=["device", "host", "python"])
def test_a_split_does_not_show(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, most_tokens: int, error: Exception
) -> None:
    ample, short = make_bench(), make_bench()
    wanted = a_pass(ample)
    with monkeypatch.context() as patch:
        allocator = Allocator(patch, most_tokens, error)
        assert a_pass(short) == wanted
    assert allocator.refused
    assert_equal_worlds(short, ample)


def test_after_a_split_the_rest_of_the_stage_is_packed_as_small(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(microbatch_tokens=64)
    bench.ok(*(bench.create(f"r{i}", 2) for i in range(32)))
    allocator = Allocator(monkeypatch, 16)
    bench.ok(*(bench.fb(f"r{i}", ce_data([8], i)) for i in range(32)))
    assert allocator.refused == 2
    assert allocator.computed == [16] * 16


def test_what_does_not_fit_alone_fails_alone_and_says_what_to_do(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    ample, short = make_bench(microbatch_tokens=32), make_bench(microbatch_tokens=32)
    for bench in (ample, short):
        bench.ok(bench.create("a"), bench.create("n"), bench.create("m"))
    for bench in (ample, short):
        if bench is short:
            Allocator(monkeypatch, 24)
        large, many = bench.fb("a", ce_data([4, 31], 1)), bench.fb("m", ce_data([9, 9, 9], 1))
        fine = bench.fb("n", ce_data([12, 12], 2))
        done = bench.go(large, many, fine, bench.optim("n"))
    failure = done[large.op_id].failure
    assert failure is not None
    assert failure.category == "user"
    assert failure.message.startswith("out of memory: datum 1 has 31 tokens")
    assert "shorter sequences" in failure.message
    failure = done[many.op_id].failure
    assert failure is not None
    assert "data 0 to 2 have 27 tokens" in failure.message
    assert "slice_tokens" in failure.message
    assert done[fine.op_id].failure is None
    assert short.run("a").grad is None
    assert_equal_worlds(short, ample, "n")
    short.ok(short.fb("a", ce_data([4], 1)), short.optim("a", knows=large.seq))


def test_idle_runs_make_room_first(make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench()
    bench.ok(*(bench.create(run_id) for run_id in "abcd"))
    Allocator(monkeypatch, 10)
    bench.ok(bench.fb("a", ce_data([8], 1)), bench.fb("b", ce_data([8], 1)))
    assert [bench.trainer.residency.is_here(run_id) for run_id in "abcd"] == [True, True, False, False]


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "python"])
def test_a_new_run_has_idle_ones_make_room(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Where that is not enough it waits: a run lost with its trainer must not end for want of memory."""
    bench, room = make_bench(), 2
    bench.ok(bench.create("a"), bench.create("b"))
    real = runs_arena.Arena

    def allocate(kind: runs_arena.ArenaKind, device: torch.device) -> runs_arena.Arena:
        if bench.trainer.residency.size_bytes >= room * kind.size_bytes:
            raise error
        return real(kind, device)

    monkeypatch.setattr(runs_arena, "Arena", allocate)
    bench.ok(bench.create("c"))
    assert [bench.trainer.residency.is_here(run_id) for run_id in "abc"] == [False, False, True]
    room = 0
    for op in (bench.create("d"), replayed(bench.create("e"))):
        assert bench.go(op) == {}
        (aside,) = (message for message in bench.sent if isinstance(message, SetAside))
        assert (aside.run_id, aside.lasting) == (op.run_id, False)
        assert "Cannot allocate memory" in aside.reason
    room = 9
    bench.ok(bench.fb("a", ce_data([4], 1)))


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "python"])
def test_a_run_whose_weights_find_no_memory_waits(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is not broken for good, since there may be memory later."""
    bench = make_bench()

    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Adapter, "init", refuse)
        for op in (bench.create("a"), replayed(bench.create("b"))):
            assert bench.go(op) == {}
            (aside,) = (message for message in bench.sent if isinstance(message, SetAside))
            assert (aside.run_id, aside.lasting) == (op.run_id, False)
            assert "Cannot allocate memory" in aside.reason
    bench.ok(bench.create("c"))


def test_a_trainer_of_less_memory_breaks_no_run(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    history = [bench.create("a"), bench.fb("a", ce_data([31], 1))]
    bench.ok(*history)
    before = bench.run("a").grad
    assert before is not None
    bench.restart()
    with monkeypatch.context() as patch:
        Allocator(patch, 24)
        assert bench.go(*map(replayed, history)) == {}
        (aside,) = (message for message in bench.sent if isinstance(message, SetAside))
        assert (aside.kept, aside.lasting) == (False, False)
        assert "have the operator give the trainer more memory" in aside.reason
    bench.ok(*map(replayed, history))
    rebuilt = bench.run("a").grad
    assert rebuilt is not None
    assert torch.equal(rebuilt.flat, before.flat)


@pytest.mark.parametrize("error", [*ERRORS, ValueError("not what was saved")], ids=["cuda", "cpu", "python", "bad"])
def test_a_run_that_is_half_restored_leaves_its_memory(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The gradient of an open operation finds no memory, or cannot be read."""
    bench = make_bench()
    create, step = bench.create("a"), bench.fb("a", ce_data([5], 7))
    first, second = sliced(bench.fb("a", ce_data([6, 4], 1)), 1)
    bench.ok(create, step, first)
    bench.go(hand_over=["a"])
    (taken,) = bench.snapshots
    restore = msgspec.structs.replace(create, replay=True, source_ref=taken.ref, with_optimizer=True, seq=taken.seq)

    def refuse(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Adapter, "zeros", refuse)
        for _ in range(3):
            assert bench.go(restore) == {}
            assert any(isinstance(message, SetAside) for message in bench.sent)
    bench.trainer.residency.squeeze()
    assert bench.trainer.residency.size_bytes == 0
    bench.ok(restore, second)


@pytest.mark.parametrize(("refusals", "fails"), [(1, False), (2, True), (99, True)])
def test_a_gradient_of_its_own_that_finds_no_memory(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, refusals: int, fails: bool
) -> None:
    """The operation begins while another is open: it is tried again, or fails alone."""
    ample, short = make_bench(), make_bench()
    zeros = Adapter.zeros

    def refuse(*args: Any) -> Any:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise ERRORS[0]
        return zeros(*args)

    for bench in (ample, short):
        bench.ok(bench.create("a"), bench.create("b"))
        first, second = sliced(bench.fb("a", ce_data([6, 4], 1)), 1)
        bench.ok(first)
        with monkeypatch.context() as patch:
            if bench is short:
                patch.setattr(Adapter, "zeros", refuse)
            other, neighbour = bench.fb("a", ce_data([5], 2)), bench.fb("b", ce_data([5], 2))
            done = bench.go(second, other, neighbour)
        failed = {op_id for op_id, each in done.items() if each.failure is not None}
        assert failed == ({other.op_id} if fails and bench is short else set())
        bench.ok(bench.optim("a", knows=other.seq), bench.optim("b"))
    assert_equal_worlds(short, ample, "b" if fails else "ab")


def test_what_counts_as_out_of_memory() -> None:
    assert all(is_out_of_memory(error) for error in ERRORS)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50)
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(RuntimeError("boom"))
    assert not is_out_of_memory(ValueError("out of memory"))


class Room:
    """A machine with memory for the states of so many runs, whatever the trainer's budget is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bench: Bench, error: Exception = ERRORS[0]) -> None:
        self.runs, real = 99, runs_arena.Arena

        def allocate(kind: runs_arena.ArenaKind, device: torch.device) -> runs_arena.Arena:
            if bench.trainer.residency.size_bytes >= self.runs * kind.size_bytes:
                raise error
            return real(kind, device)

        monkeypatch.setattr(runs_arena, "Arena", allocate)


def paged_out(bench: Bench, runs: str = "abc") -> None:
    """Make these runs, with a gradient each, and page them out: they are on the disk, and their memory is free."""
    bench.ok(*(bench.create(run_id) for run_id in runs))
    bench.ok(*(bench.fb(run_id, ce_data([5], 7)) for run_id in runs))
    bench.trainer.residency.squeeze()


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "python"])
@pytest.mark.parametrize("room", [1, 2])
def test_runs_that_come_back_have_others_make_room(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, error: Exception, room: int
) -> None:
    """Also those in the same pass, and those that are to be saved."""
    ample, short = make_bench(snapshot_every_tokens=1), make_bench(snapshot_every_tokens=1)
    for bench in (ample, short):
        paged_out(bench)
        if bench is short:
            Room(monkeypatch, bench, error).runs = room
        first, second = sliced(bench.fb("a", ce_data([6, 4], 1)), 1)
        bench.ok(first, bench.fb("b", rl_data([11, 5], 2), "ppo"), bench.optim("b"))
        done = bench.ok(second, bench.fb("c", ce_data([6], 3)), *(bench.optim(run_id) for run_id in "abc"))
        assert len(done) == 5
        bench.trainer.residency.squeeze()
    monkeypatch.undo()
    assert_equal_worlds(short, ample)


@pytest.mark.parametrize("kind", ["fb", "forward", "optim", "save"])
def test_a_run_that_cannot_come_back_waits(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The trainer goes on, nobody is told of a failure, and the run is as it was when its turn comes."""
    ample, short = make_bench(), make_bench()
    for bench in (ample, short):
        paged_out(bench)
        room = Room(monkeypatch, bench)
        ops = {
            "fb": lambda at: at.fb("a", ce_data([6, 4], 1)),
            "forward": lambda at: at.fb("a", ce_data([6, 4], 1), kind=OpKind.FORWARD),
            "optim": lambda at: at.optim("a"),
            "save": lambda at: at.op("a", OpKind.SAVE_STATE, target_ref="weights/a"),
        }
        op = ops[kind](bench)
        if bench is short:
            room.runs = 0
            assert bench.go(op) == {}
            (aside,) = (message for message in bench.sent if isinstance(message, SetAside))
            assert (aside.run_id, aside.lasting, aside.kept) == ("a", False, True)
            assert "Cannot allocate memory" in aside.reason
            room.runs = 99
        bench.ok(op)
        bench.ok(bench.optim("a"))
    assert_equal_worlds(short, ample)


def test_a_run_that_cannot_come_back_in_the_middle_of_an_operation_is_rebuilt(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    paged_out(bench, "ab")
    first, second = sliced(bench.fb("a", ce_data([6, 4], 1)), 1)
    bench.ok(first)
    bench.trainer.residency.squeeze()
    room = Room(monkeypatch, bench)
    room.runs = 0
    assert bench.go(second) == {}
    (aside,) = (message for message in bench.sent if isinstance(message, SetAside))
    assert (aside.run_id, aside.lasting, aside.kept) == ("a", False, False)
    room.runs = 99
    assert "a" not in bench.trainer.held.runs
    assert bench.trainer.held.open == {}
    bench.ok(bench.optim("b"))


@pytest.mark.parametrize("accumulated", [False, True], ids=["alone", "behind a gradient"])
def test_what_was_spoilt_before_an_operation_waits_is_not_in_its_gradient(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, accumulated: bool
) -> None:
    """The operation's first slice runs out of memory in the backward. Before the next slice its run was paged out and
    finds no memory to come back. When there is memory again the whole operation is computed anew."""
    ample, short = make_bench(), make_bench()
    for bench in (ample, short):
        bench.ok(bench.create("a"))
        if accumulated:
            bench.ok(bench.fb("a", ce_data([5], 7)))
        op = bench.fb("a", ce_data([12, 4], 1))
        if bench is short:
            with monkeypatch.context() as patch:
                room, allocator = Room(patch, bench), Allocator(patch, 10)
                first, second = sliced(op, 1)
                assert bench.go(first) == {}
                assert allocator.refused
                bench.trainer.residency.squeeze()
                room.runs = 0
                assert bench.go(second) == {}
                (aside,) = (message for message in bench.sent if isinstance(message, SetAside))
                assert aside.kept
        bench.ok(op)
        bench.ok(bench.optim("a"))
    assert_equal_worlds(short, ample, "a")


def test_an_operation_that_began_anew_is_rebuilt_from_its_snapshot(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first slice is saved, the second runs out of memory and begins the operation anew, and before the third its
    run finds no memory. The server sends again what follows the saved slice, so the run must be rebuilt from there."""
    ample, short = make_bench(), make_bench()
    for bench in (ample, short):
        bench.ok(bench.create("a"))
        op = bench.fb("a", ce_data([4, 12, 5], 1))
        first, second, third = sliced(op, 1, 2)
        if bench is ample:
            bench.ok(first, second, third)
        else:
            assert bench.go(first) == {}
            bench.trainer.drain(bench.snapshots.append)
            snapshot = bench.snapshots[-1]
            assert (snapshot.part_op, snapshot.part_stop) == (op.op_id, 1)
            with monkeypatch.context() as patch:
                room, allocator = Room(patch, bench), Allocator(patch, 3)
                assert bench.go(second) == {}
                assert allocator.refused
                bench.trainer.residency.squeeze()
                room.runs = 0
                assert bench.go(third) == {}
                (aside,) = (message for message in bench.sent if isinstance(message, SetAside))
                assert not aside.kept
            bench.restart()
            bench.ok(restore(bench, snapshot), second, third)
        bench.ok(bench.optim("a"))
    assert_equal_worlds(short, ample, "a")


def test_a_run_that_did_not_come_is_forgotten_like_any(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    paged_out(bench)
    room = Room(monkeypatch, bench)
    room.runs = 1
    residency = bench.trainer.residency
    for run_id in "ab":
        residency.fetch(bench.trainer.held.runs[run_id])
    residency.settle()
    bench.go(release=["b"])
    bench.ok(bench.optim("a"), bench.optim("c"))


def test_runs_that_are_saved_as_the_trainer_leaves_make_room(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is no memory, the journal has what is not saved."""
    bench = make_bench()
    paged_out(bench)
    room = Room(monkeypatch, bench)
    for room.runs, saved in ((0, []), (1, ["a", "b", "c"])):
        sent = list[Any]()
        bench.trainer.drain(sent.append)
        assert sorted(message.run_id for message in sent) == saved
