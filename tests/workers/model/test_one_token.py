"""One token through a recurrence: the formula in float64, in C and in torch, and bits that no neighbour can change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from workers.model.native import build
from workers.model.parts import one_token as module
from workers.model.parts.one_token import Tokens, one_token

ROWS, HEADS, DIM = 9, 6, 20


@pytest.fixture(params=["c", "torch"], autouse=True)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(build, "library", lambda source: None)
    else:
        assert build.library(module._SOURCE) is not None, "install a C compiler"


def drawn(*, delta: bool, width: int = 24, groups: int = 2) -> tuple[Tokens, list[Tensor]]:
    """Random tokens. Decays reach from states that last for hundreds of tokens to those that last for one; keys have
    length one."""
    generator = torch.Generator().manual_seed(width)
    q, k = torch.randn(2, ROWS, groups, DIM, generator=generator)
    v = torch.randn(ROWS, HEADS, width, generator=generator)
    decay, rate = torch.rand(2, ROWS, HEADS, generator=generator)
    k = k / k.norm(dim=-1, keepdim=True)
    states = torch.randn(ROWS, HEADS, DIM, width, generator=generator)
    return Tokens(q, k, v, decay, rate if delta else None), list(states)


def formula(tokens: Tokens, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The formula row by row and head by head, in float64."""
    outs, ends = [], []
    for row, state in enumerate(states):
        for head, s_DV in enumerate(state.double()):
            group = head // (HEADS // tokens.k_RGD.shape[1])
            q, k, v = tokens.q_RGD[row, group].double(), tokens.k_RGD[row, group].double(), tokens.v_RHV[row, head]
            decayed = tokens.decay_RH[row, head].double() * s_DV
            written = v.double()
            if tokens.rate_RH is not None:
                written = tokens.rate_RH[row, head] * (written - decayed.t() @ k)
            ends.append(decayed + torch.outer(k, written))
            outs.append(ends[-1].t() @ q)
    shape = (len(states), HEADS)
    return torch.stack(outs).unflatten(0, shape), list(torch.stack(ends).unflatten(0, shape))


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize(("width", "groups"), [(1, 1), (15, 6), (16, 2), (24, 3), (64, 2), (128, 6), (221, 1)])
def test_numbers_are_the_formulas_and_the_states_before_stay(width: int, groups: int, delta: bool) -> None:
    tokens, states = drawn(delta=delta, width=width, groups=groups)
    before = [state.clone() for state in states]
    out, ends = one_token(tokens, states)
    wanted, wanted_ends = formula(tokens, before)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    for end, right in zip(ends, wanted_ends, strict=True):
        torch.testing.assert_close(end.double(), right, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(before, states, strict=True))


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("width", [24, 130])
def test_a_row_has_the_same_bits_in_any_batch_by_any_threads(width: int, delta: bool) -> None:
    tokens, states = drawn(delta=delta, width=width)
    out, ends = one_token(tokens, states)
    before = torch.get_num_threads()
    try:
        for threads, rows in ((1, [4]), (2, [8, 1]), (3, [0, 7, 4, 2, 5]), (3, list(range(ROWS)))):
            torch.set_num_threads(threads)
            own = Tokens(*(None if part is None else part[rows] for part in tokens))  # type: ignore[arg-type]
            found, after = one_token(own, [states[row].clone() for row in rows])
            assert torch.equal(found, out[rows])
            assert all(torch.equal(end, ends[row]) for end, row in zip(after, rows, strict=True))
    finally:
        torch.set_num_threads(before)


def test_a_nan_stays_in_its_row() -> None:
    tokens, states = drawn(delta=True)
    clean, ends = one_token(tokens, states)
    states[5] = states[5].clone()
    states[5][0, 0, 0] = torch.nan
    spoilt, after = one_token(tokens, states)
    others = torch.arange(ROWS) != 5
    assert spoilt[5].isnan().any()
    assert torch.equal(spoilt[others], clean[others])
    assert all(torch.equal(after[row], ends[row]) for row in range(ROWS) if row != 5)


def test_states_and_tokens_that_do_not_lie_side_by_side() -> None:
    tokens, states = drawn(delta=True)
    wide = torch.zeros(ROWS, 2, 3 * DIM)
    wide[..., DIM : 2 * DIM] = tokens.q_RGD
    turned = [state.transpose(1, 2).contiguous().transpose(1, 2) for state in states]
    found = one_token(tokens._replace(q_RGD=wide[..., DIM : 2 * DIM]), turned)
    assert torch.equal(found[0], one_token(tokens, states)[0])
