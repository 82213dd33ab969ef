"""Mamba-2's chunks against its formula, token by token in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.model.parts.mamba2 import _Tokens, by_chunks

HEADS, GROUPS, STATE, WIDTH = 4, 2, 5, 3


def token_by_token(tokens: _Tokens, state_HDV: Tensor) -> tuple[Tensor, Tensor]:
    """S = exp(decay) S + b x^T, out = S^T c."""
    outs = []
    for n in range(tokens.x_HNV.shape[1]):
        b, c = (t[:, n].repeat_interleave(HEADS // GROUPS, 0) for t in (tokens.b_GND, tokens.c_GND))
        state_HDV = state_HDV * tokens.decay_HN[:, n, None, None].exp() + b[:, :, None] * tokens.x_HNV[:, n, None]
        outs.append((state_HDV * c[:, :, None]).sum(1))
    return torch.stack(outs, 1), state_HDV


def drawn(count: int) -> list[Tensor]:
    """x, b, c, decays from states that last for hundreds of tokens to those that last for one, and a first state."""
    generator = torch.Generator().manual_seed(count)
    shapes = [(HEADS, count, WIDTH), (GROUPS, count, STATE), (GROUPS, count, STATE), (HEADS, STATE, WIDTH)]
    x, b, c, state = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    decay = -torch.tensor([0.003, 0.05, 0.5, 5.0]).double()[:, None] * torch.rand(HEADS, count, generator=generator)
    return [x, b, c, decay, state]


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 150])
def test_chunks_are_the_formula_and_so_are_their_gradients(count: int) -> None:
    inputs = [tensor.requires_grad_() for tensor in drawn(count)]
    weights = torch.randn(HEADS, count, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for of in (by_chunks, token_by_token):
        out, end = of(_Tokens(*inputs[:4]), inputs[4])
        gradients = torch.autograd.grad((out * weights).sum() + end.square().sum(), inputs)
        found.append((out, end, *gradients))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_a_sequence_may_be_cut_anywhere() -> None:
    *inputs, state = drawn(150)
    whole, end = by_chunks(_Tokens(*inputs), state)
    outs = []
    for part in zip(*(tensor.split([32, 100, 18], dim=1) for tensor in inputs), strict=True):
        out, state = by_chunks(_Tokens(*part), state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(state, end, atol=1e-9, rtol=1e-9)
