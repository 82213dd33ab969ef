"""AdamW against torch.optim.AdamW with clip_grad_norm_, and alone against together."""

import pytest
import torch
from weft.wire.checks.runs import LEAST_EPS

from workers.trainer.steps.adamw import Adam, Step, clip_gradients, clip_scale, norms_of, step_many

SETTINGS = [
    Adam(learning_rate=1e-2),
    Adam(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.1),
    Adam(learning_rate=1e-2, grad_clip_norm=0.5),
    Adam(learning_rate=1e-2, weight_decay=0.3, grad_clip_norm=1e3),
]


def fresh(size: int, seed: int) -> Step:
    weights = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return Step(SETTINGS[0], weights, torch.zeros(size), torch.zeros(size), torch.zeros(size), 0)


def gradients(size: int, seed: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(size, generator=generator) for _ in range(steps)]


def train(members: list[tuple[Adam, int, int]], steps: int = 5) -> list[Step]:
    states = [fresh(size, seed) for _, size, seed in members]
    feeds = [gradients(size, seed, steps) for _, size, seed in members]
    for i in range(steps):
        for (adam, _, _), state, feed in zip(members, states, feeds, strict=True):
            state.adam, state.grad, state.step = adam, feed[i].clone(), i
        step_many(states)
    return states


@pytest.mark.parametrize("adam", SETTINGS, ids=["plain", "decay", "clipped", "loose-clip"])
def test_equals_torch(adam: Adam) -> None:
    size, seed, steps = 1037, 3, 6
    ours = train([(adam, size, seed)], steps)[0]
    theirs = torch.nn.Parameter(fresh(size, seed).weights)
    optimizer = torch.optim.AdamW(
        [theirs], lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
    )
    for gradient in gradients(size, seed, steps):
        theirs.grad = gradient.clone()
        if adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_([theirs], adam.grad_clip_norm)
        optimizer.step()
    moments = optimizer.state[theirs]
    torch.testing.assert_close(
        (ours.weights, ours.m, ours.v),
        (theirs.detach(), moments["exp_avg"], moments["exp_avg_sq"]),
        atol=1e-6,
        rtol=1e-6,
    )


@pytest.mark.parametrize("norm", [1e-6, 3e-6])
def test_a_small_gradient_is_clipped_as_by_torch(norm: float) -> None:
    theirs = torch.nn.Parameter(torch.zeros(1))
    theirs.grad = torch.tensor([norm])
    torch.nn.utils.clip_grad_norm_([theirs], 1.5e-6)
    assert norm * clip_scale(norm, 1.5e-6) == pytest.approx(theirs.grad.item(), rel=1e-5)


def test_alone_and_together_are_bitwise_equal() -> None:
    members = [(adam, 501 + 77 * i, i) for i, adam in enumerate(SETTINGS)] + [(SETTINGS[0], 64, 9)]
    together = train(members)
    for member, crowded in zip(members, together, strict=True):
        alone = train([member])[0]
        assert torch.equal(alone.weights, crowded.weights)
        assert torch.equal(alone.m, crowded.m)
        assert torch.equal(alone.v, crowded.v)


def test_zero_gradient_step_decays_momentum_only() -> None:
    state = fresh(10, 0)
    state.step = 6
    before = state.weights.clone()
    metrics = step_many([state])
    assert torch.equal(state.weights, before)
    assert metrics == [{"grad_norm:mean": 0.0, "learning_rate:mean": 1e-2, "step:max": 7.0}]


@pytest.mark.parametrize("scale", [1e-3, 1e25], ids=["small", "squares-overflow"])
def test_the_norm_of_a_large_gradient_is_that_of_float64(scale: float) -> None:
    grad = torch.randn(5_000_000, generator=torch.Generator().manual_seed(1)).mul_(scale)
    exact = float(grad.double().norm())
    (norm,) = norms_of([grad])
    assert norm == pytest.approx(exact, rel=1e-6)
    clip_gradients([(grad, clip_scale(norm, 1.0))])
    assert float(grad.double().norm()) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("beta2", [0.95, 0.9999])
def test_with_the_least_eps_a_weight_moves_by_no_more_than_the_learning_rate(beta2: float) -> None:
    """Squares of these gradients come down to 0."""
    gradient = torch.logspace(-18, -40, 200)
    weights, m, v = (torch.zeros(200) for _ in range(3))
    step = Step(Adam(1e-2, beta2=beta2, eps=LEAST_EPS), weights, m, v, gradient, 0)
    step_many([step])
    exact = 1e-2 / (1 + LEAST_EPS / gradient.double())
    assert float((-step.weights / exact).max()) < 2
    assert float(-step.weights.min()) <= 1e-2


def test_with_the_least_eps_a_weight_without_a_gradient_stays() -> None:
    """A smaller eps is 0 to the kernel, and 0 / 0 the weight."""
    step = Step(Adam(eps=LEAST_EPS), *(torch.zeros(4) for _ in range(4)), step=0)
    step_many([step])
    assert step.weights.tolist() == [0.0] * 4
