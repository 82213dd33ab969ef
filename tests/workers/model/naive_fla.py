"""The documented formulas of fla-core's kernels, token by token over packed sequences (0.6.0:
fla/ops/gated_delta_rule/naive.py and fla/ops/simple_gla/naive.py); and checks of the kernels' inputs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.gpu.fla import Kernels

#: The lengths of chunks that callers asked for.
CHUNKS: set[int] = set()


def _bounds(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, tokens: int) -> list[tuple[int, int]]:
    assert not cu_seqlens_cpu.is_floating_point()
    assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
    bounds = [*pairwise(cu_seqlens_cpu.tolist())]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == tokens
    assert all(start < stop for start, stop in bounds)
    return bounds


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, initial_state: Tensor | None = None,
    output_final_state: bool = False, activation: str | None = None, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """x [1, T, D], weight [D, W]; states [N, D, W] hold the last W inputs, of which the oldest is not needed."""
    (one, tokens, width), taps = x.shape, weight.shape[1]
    assert (one, activation, weight.shape[0], x.dtype) == (1, "silu", width, torch.float32)
    bounds = _bounds(cu_seqlens, cu_seqlens_cpu, tokens)
    assert initial_state is None or initial_state.shape == (len(bounds), width, taps)
    outs, ends = [], []
    for n, (start, stop) in enumerate(bounds):
        before = x.new_zeros(width, taps) if initial_state is None else initial_state[n]
        seen_DT = torch.cat((before, x[0, start:stop].T), dim=1)
        outs.append(F.silu(F.conv1d(seen_DT[None, :, 1:], weight[:, None], bias, groups=width))[0].T)
        ends.append(seen_DT[:, -taps:])
    return torch.cat(outs)[None], torch.stack(ends) if output_final_state else None


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float, initial_state: Tensor | None,
    bounds: list[tuple[int, int]],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k [1, T, H, K], v [1, T, HV, V], g and beta [1, T, HV], states [N, HV, K, V]."""
    heads = v.shape[2]
    assert all(t.dtype == torch.float32 and t.shape[:2] == v.shape[:2] for t in (q, k, v, g))
    assert q.shape == k.shape
    assert g.shape == v.shape[:3]
    assert (g <= 0).all(), "decays are logarithms"
    assert initial_state is None or initial_state.shape == (len(bounds), heads, k.shape[3], v.shape[3])
    q, k = (t.repeat_interleave(heads // q.shape[2], 2)[0] for t in (q * scale, k))
    outs, ends = [], []
    for n, (start, stop) in enumerate(bounds):
        state = v.new_zeros(heads, k.shape[-1], v.shape[-1]) if initial_state is None else initial_state[n]
        for t in range(start, stop):
            state = state * g[0, t, :, None, None].exp()
            written = v[0, t]
            if beta is not None:
                written = (written - (state * k[t, ..., None]).sum(1)) * beta[0, t, :, None]
            state = state + k[t, ..., None] * written[:, None]
            outs.append((state * q[t, ..., None]).sum(1))
        ends.append(state)
    return torch.stack(outs)[None], torch.stack(ends)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert chunk_size in (16, 32, 64)
    CHUNKS.add(chunk_size)
    assert len(q) == 1
    assert beta.shape == g.shape
    out, end = recurrence(q, k, v, g, beta, scale, initial_state, _bounds(cu_seqlens, cu_seqlens_cpu, q.shape[1]))
    return out, end if output_final_state else None


def scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert q.shape[2] == v.shape[2], "queries and keys of every head"
    CHUNKS.add(chunk_size)
    out, end = recurrence(q, k, v, g, None, scale, initial_state, _bounds(cu_seqlens, cu_seqlens_cpu, q.shape[1]))
    return out, end if output_final_state else None


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, beta: Tensor | None, scale: float, initial_state: Tensor,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token of each row: [R, 1, ...]."""
    assert output_final_state
    assert v.shape[1] == 1
    rows = []
    for n in range(len(q)):
        one = slice(n, n + 1)
        rate = None if beta is None else beta[one]
        rows.append(recurrence(q[one], k[one], v[one], g[one], rate, scale, initial_state[one], [(0, 1)]))
    return torch.cat([out for out, _ in rows]), torch.cat([end for _, end in rows])


def scan_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    assert q.shape[2] == v.shape[2], "queries and keys of every head"
    return delta_step(q, k, v, g, beta=None, **options)


NAIVE = Kernels(convolution, delta_rule, delta_step, scan, scan_step)
