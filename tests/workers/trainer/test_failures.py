"""An operation that fails does so alone: its run and its neighbours go on as if it had never been sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from weft.wire.binary.train_codec import ArrayDatum

from scheduler.links.messages import OpKind, Pass
from tests.workers.trainer.kit import MODEL, Bench, arenas, ce_data, output, rl_data, sliced
from workers.trainer import computing
from workers.trainer.microbatch import run_microbatch


def spoilt(field: str, value: float):
    data = ce_data([6, 9], seed=3)
    data[1].inputs[field] = data[1].inputs[field].copy()
    data[1].inputs[field][4] = value
    return data


def beside_a_neighbour(bench: Bench, *ops_of_a, clean_world: Bench):
    """Execute ops of run a beside a neighbour's, and check that the neighbour gets what it gets without them."""
    work = [b.fb("n", ce_data([20, 3], seed=8)) for b in (bench, clean_world)]
    clean = clean_world.ok(work[1], clean_world.optim("n"))
    done = bench.go(*ops_of_a, work[0], bench.optim("n"))
    assert done[work[0].op_id].payload == clean[work[1].op_id].payload
    for x, y in zip(arenas(bench.run("n")), arenas(clean_world.run("n")), strict=True):
        assert torch.equal(x, y)
    return done


@pytest.fixture
def worlds(make_bench):
    benches = make_bench(), make_bench()
    for bench in benches:
        bench.ok(bench.create("a"), bench.create("n", 8))
    return benches


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("weights", float("nan"), "datum 1: 'weights' is nan at element 4"),
        ("weights", 3e38, "datum 1|not finite|loss is"),
        ("target_tokens", 96, "datum 1: target_tokens holds token 96 at position 4; this model's tokens are 0 to 95"),
        ("target_tokens", -1, "datum 1: target_tokens holds token -1 at position 4; this model's tokens are 0 to 95"),
    ],
)
def test_bad_values_fail_their_operation_only(worlds, field: str, value: float, words: str) -> None:
    bench, clean = worlds
    good = bench.fb("a", ce_data([5], seed=1))
    bench.ok(good)
    before = bench.run("a").grad.flat.clone()
    data = spoilt(field, value)
    if value == 3e38:
        data[1].inputs[field][:] = value
    bad = bench.fb("a", data)
    done = beside_a_neighbour(bench, bad, clean_world=clean)
    failure = done[bad.op_id].failure
    assert failure.category == "user"
    assert any(word in failure.message for word in words.split("|"))
    assert done[bad.op_id].payload == b""
    # A refused operation costs nothing; one that was computed, and failed because of its data, is billed.
    assert done[bad.op_id].facts == ({"tokens": sum(len(datum.tokens) for datum in data)} if value == 3e38 else {})
    assert torch.equal(bench.run("a").grad.flat, before)
    bench.ok(bench.fb("a", ce_data([4], seed=9)), bench.optim("a", knows=bad.seq))


def test_infinite_ratio_names_its_datum(worlds) -> None:
    bench, clean = worlds
    data = rl_data([6, 9], seed=3)
    data[1].inputs["logprobs"][2] = -1e5
    bad = bench.fb("a", data, "importance_sampling")
    failure = beside_a_neighbour(bench, bad, clean_world=clean)[bad.op_id].failure
    assert failure.category == "user"
    assert failure.message.startswith("datum 1: its gradient of the loss is not finite")
    assert "position 2" in failure.message


def test_weights_that_are_not_finite_hurt_their_own_run_only(worlds) -> None:
    bench, clean = worlds
    bench.run("a").adapter.view("layers.0.attn.o_B").fill_(float("nan"))
    bad = bench.fb("a", ce_data([6], seed=3))
    failure = beside_a_neighbour(bench, bad, clean_world=clean)[bad.op_id].failure
    assert failure.message.startswith("datum 0: its log-probabilities are not finite")
    assert "the largest of this run's weights is nan" in failure.message
    assert bench.run("a").grad is None


@pytest.mark.parametrize("learning_rate", [1e18, 1e30])
def test_what_follows_a_step_that_was_far_too_large_says_so(worlds, learning_rate: float) -> None:
    bench, clean = worlds
    bench.ok(bench.fb("a", ce_data([6], seed=3)), bench.optim("a", learning_rate=learning_rate))
    bad = bench.fb("a", ce_data([6], seed=3))
    failure = beside_a_neighbour(bench, bad, clean_world=clean)[bad.op_id].failure
    assert failure.category == "user"
    assert f"the largest of this run's weights is {learning_rate:.3g}: if its steps were too large" in failure.message


def test_gradient_overflow_leaves_the_run_as_it_was(worlds) -> None:
    bench, clean = worlds
    data = ce_data([40], seed=3)
    data[0].inputs["weights"][:] = 1e36
    bench.run("a").adapter.view("layers.0.attn.q_B").fill_(1e3)
    bad = bench.fb("a", data)
    failure = beside_a_neighbour(bench, bad, clean_world=clean)[bad.op_id].failure
    assert failure.category == "user"
    assert "not finite" in failure.message
    assert bench.run("a").grad is None


def test_gradients_whose_sum_overflows_leave_the_sum_before(worlds) -> None:
    """Each of them is finite, up to 6e37."""
    bench, clean = worlds
    [datum] = ce_data([5], seed=1)
    large = [ArrayDatum(datum.tokens, {**datum.inputs, "weights": np.float32(3e37) * np.float32([1, -1, 1, -1, 0])})]
    bench.ok(*(bench.fb("a", large) for _ in range(5)))
    before = bench.run("a").grad.flat.clone()
    bad = bench.fb("a", large)
    done = beside_a_neighbour(bench, bad, clean_world=clean)
    assert done[bad.op_id].failure.category == "user"
    assert "beyond float32: scale weights or advantages down" in done[bad.op_id].failure.message
    assert torch.equal(bench.run("a").grad.flat, before)


def test_a_step_whose_squares_overflow_leaves_its_run_and_gradient(worlds) -> None:
    """Its second moments would be infinite, and the weights never move again."""
    bench, clean = worlds
    [datum] = ce_data([5], seed=1)
    bench.ok(bench.fb("a", [ArrayDatum(datum.tokens, {**datum.inputs, "weights": np.full(5, 1e20, np.float32)})]))
    before = [arena.clone() for arena in (*arenas(bench.run("a")), bench.run("a").grad.flat)]
    step = bench.optim("a")
    done = beside_a_neighbour(bench, step, clean_world=clean)
    assert done[step.op_id].failure.category == "user"
    assert "repeat the step with adam_params.grad_clip_norm" in done[step.op_id].failure.message
    for kept, now in zip(before, (*arenas(bench.run("a")), bench.run("a").grad.flat), strict=True):
        assert torch.equal(kept, now)
    bench.ok(bench.optim("a", grad_clip_norm=1.0))
    assert bench.run("a").step == 1
    assert bool(torch.isfinite(bench.run("a").v).all())


def test_all_slices_of_a_bad_operation_give_one_failure(worlds) -> None:
    bench, clean = worlds
    first, last = sliced(bench.fb("a", spoilt("weights", float("inf"))), 1)
    assert first.op_id not in beside_a_neighbour(bench, first, clean_world=clean)
    done = bench.go(last)
    assert "'weights' is inf" in done[last.op_id].failure.message
    assert done[last.op_id].failure.category == "user"


def test_an_exception_in_a_shared_microbatch_fails_only_the_guilty_operation(worlds, monkeypatch) -> None:
    """Also if it is raised after gradients were added, and if slices of earlier passes must be restored."""
    bench, clean = worlds
    whole = [b.fb("a", ce_data([9, 30, 4], seed=5)) for b in worlds]
    clean.ok(whole[1])
    bench.ok(bench.create("g"))
    slices = sliced(whole[0], 1, 2)
    bench.ok(slices[0])
    monkeypatch.setattr(computing, "run_microbatch", _raise_in_backward)
    guilty = bench.fb("g", ce_data([5], seed=4))
    done = bench.go(slices[1], guilty, slices[2])
    assert done[guilty.op_id].failure.message == "RuntimeError: boom"
    assert done[guilty.op_id].failure.category == "server"
    assert done[whole[0].op_id].failure is None
    assert torch.allclose(bench.run("a").grad.flat, clean.run("a").grad.flat, atol=1e-5)
    assert bench.run("g").grad is None


def _raise_in_backward(decoder, parts, *, trains):
    """Fail half-way through the backward: arenas are spoilt, and no results added."""
    if any(part.progress.op.run_id == "g" for part in parts):
        for part in parts:
            part.progress.grad.flat.add_(1.0)
        raise RuntimeError("boom")
    run_microbatch(decoder, parts, trains=trains)


def test_unknown_run_and_model_are_the_services_errors(bench: Bench) -> None:
    ops = [bench.fb("x", ce_data([3], 0)), bench.optim("x"), bench.op("x", OpKind.SAVE_STATE, target_ref="w/x")]
    done = bench.go(*ops)
    assert {d.failure.category for d in done.values()} == {"server"}
    assert all("run x is not on this trainer" in d.failure.message for d in done.values())
    other = bench.create("y", base_model="big")
    assert f"it has ['{MODEL}']" in bench.go(other)[other.op_id].failure.message


def test_a_slice_without_its_beginning_is_refused(bench: Bench) -> None:
    bench.ok(bench.create("a"))
    _, last = sliced(bench.fb("a", ce_data([3, 4], 0)), 1)
    assert "without those before it" in bench.go(last)[last.op_id].failure.message


def test_bad_adam_params_leave_the_run_as_it_was(worlds) -> None:
    bench, _ = worlds
    bench.ok(bench.fb("a", ce_data([5], seed=1)))
    before = [x.clone() for x in (*arenas(bench.run("a")), bench.run("a").grad.flat)]
    body = b'{"model_id": "a", "adam_params": {"learning_rate": 0.1, "eps": 0.0}}'
    bad = bench.op("a", OpKind.OPTIM_STEP, body)
    good = bench.optim("n")
    done = bench.go(bad, good)
    assert done[bad.op_id].failure.category == "user"
    assert done[good.op_id].failure is None
    for x, y in zip(before, (*arenas(bench.run("a")), bench.run("a").grad.flat), strict=True):
        assert torch.equal(x, y)


def test_done_comes_as_soon_as_its_microbatch_is_over(make_bench, monkeypatch) -> None:
    bench = make_bench(microbatch_tokens=10)
    bench.ok(bench.create("a"), bench.create("b"))
    quick, long = bench.fb("a", ce_data([10], 0)), bench.fb("b", ce_data([10] * 3, 0))
    order: list[str] = []
    seen: list[int] = []

    def count(*args, **kwargs):
        seen.append(len(order))
        run_microbatch(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(computing, "run_microbatch", count)
        bench.trainer.execute(Pass(1, MODEL, [quick, long]), lambda *told: order.extend(type(m).__name__ for m in told))
    assert seen == [0, 1, 1, 1]
    assert order == ["Done", "Done", "PassOver"]


def test_multi_target_cross_entropy(bench: Bench) -> None:
    """K targets per position equal K single-target data, up to round-off."""
    bench.ok(bench.create("a"))
    [plain] = ce_data([7], seed=4)
    rng = np.random.default_rng(0)
    targets, weights = rng.integers(0, 96, (7, 3)), rng.normal(size=(7, 3)).astype(np.float32)
    multi = type(plain)(plain.tokens, {"target_tokens": targets, "weights": weights})
    singles = [
        type(plain)(plain.tokens, {"target_tokens": targets[:, k].copy(), "weights": weights[:, k].copy()})
        for k in range(3)
    ]
    one = bench.fb("a", [multi])
    [logprobs], metrics = output(bench.ok(one)[one.op_id])
    gradient = bench.run("a").grad.flat.clone()
    bench.run("a").has_grad = False
    each = bench.fb("a", singles)
    columns, wanted = output(bench.ok(each)[each.op_id])
    assert logprobs.shape == (7, 3)
    np.testing.assert_allclose(logprobs, np.stack(columns, axis=1), atol=1e-6)
    assert metrics["loss:sum"] == pytest.approx(wanted["loss:sum"], abs=1e-4)
    torch.testing.assert_close(gradient, bench.run("a").grad.flat, atol=1e-5, rtol=1e-4)
