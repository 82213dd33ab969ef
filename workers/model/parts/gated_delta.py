"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) with its causal convolution and its gated norm.

For each value head, with key k, value v, query q, a decay and a rate beta of each token, the state S [D, V] becomes
decay S + k beta (v - decay S^T k)^T, and the output is S^T q. Many tokens are computed in chunks, as in the paper's
section 3.3; a single token by the formula itself. All in float32.

Shapes: N tokens of a sequence, R sequences, M channels of the convolution, J its taps, K key heads, H value heads, D
key dim, V value dim, C chunks, L tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.config import DecoderConfig
from workers.model.gpu import fla
from workers.model.parts.chunks import by_head, chunked, convolved, faded
from workers.model.parts.frozen import frozen
from workers.model.parts.one_token import Tokens, one_token
from workers.model.parts.recurrent import Recurrent
from workers.model.parts.steady import steady
from workers.model.recur import CHUNK, Packed, State, begun

#: Added to the squared length of a query or key, against division by zero, as in the published code.
_TINY = 1e-6


class GatedDelta(Recurrent):
    """All projections of the input are one fused product, whose adapter has one stacked A and a B for each. A state is
    the last J - 1 inputs of the convolution and S of each head."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        assert config.delta is not None
        super().__init__(config, layer, config.delta)
        c, d = config.delta, config.hidden_size
        self.config = c
        self.inputs = frozen(dtype, c.in_size, d)
        self.conv = frozen(torch.float32, c.mixed_size, c.taps)
        self.decay_log = frozen(torch.float32, c.value_heads)
        self.decay_bias = frozen(torch.float32, c.value_heads)
        self.norm = frozen(torch.float32, c.value_dim)
        self.out = frozen(dtype, d, c.value_size)

    def run(self, x_NI: Tensor, state: State | None) -> tuple[Tensor, State]:
        c, x = self.config, self._inputs(x_NI)
        before_JM, start_HDV = state or self._begin(x_NI)
        seen_M = torch.cat((before_JM, x.mixed))
        taps = [seen_M[j : j + len(x_NI)] for j in range(c.taps)]
        q, k, v = self._heads(F.silu(convolved(taps, self.conv)))
        each = c.value_heads // c.key_heads
        decay_NH = self._decay(x.decay)
        q, k = (t.repeat_interleave(each, 1) for t in (q, k))
        tokens = _Tokens(*(t.transpose(0, 1) for t in (q, k, v, decay_NH, torch.sigmoid(x.rate))))
        out_HNV, end_HDV = by_chunks(tokens, start_HDV)
        return self._gated(out_HNV.transpose(0, 1), F.silu(x.gate)), (seen_M[len(x_NI) :], end_HDV)

    def step(self, x_RI: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        x = self._inputs(x_RI)
        before_RJM = torch.stack([before_JM for before_JM, _ in states])
        seen_RJM = torch.cat((before_RJM, x.mixed[:, None]), dim=1)
        q, k, v = self._heads(steady(F.silu, convolved(seen_RJM.unbind(1), self.conv)))
        decay_RH = -self.decay_log.exp() * steady(F.softplus, x.decay + self.decay_bias)
        tokens = Tokens(q, k, v, steady(torch.exp, decay_RH), steady(torch.sigmoid, x.rate))
        out_RHV, ends_HDV = one_token(tokens, [start_HDV for _, start_HDV in states], packs=self.packs)
        y = self._gated(out_RHV, steady(F.silu, x.gate))
        return y, list(zip(seen_RJM[:, 1:].unbind(), ends_HDV, strict=True))

    def run_packed(
        self, x_TI: Tensor, packed: Packed, states: Sequence[State | None] | None
    ) -> tuple[Tensor, list[State]]:
        x = self._inputs(x_TI)
        befores_JM, starts_HDV = begun(states, self._begin(x_TI))
        mixed, ends_JM = fla.convolved(x.mixed, self.conv, None, packed, befores_JM)
        rule = (*self._heads(mixed), self._decay(x.decay), torch.sigmoid(x.rate))
        out_THV, ends_HDV = fla.delta_rule(*rule, packed, starts_HDV)
        return self._gated(out_THV, F.silu(x.gate)), list(zip(ends_JM, ends_HDV, strict=True))

    def _begin(self, x: Tensor) -> State:
        """The state of a sequence that begins: zeros."""
        c = self.config
        return x.new_zeros(c.taps - 1, c.mixed_size), x.new_zeros(c.value_heads, c.key_dim, c.value_dim)

    def _decay(self, decay_NH: Tensor) -> Tensor:
        """The logarithms of the decays [N, H]."""
        return -self.decay_log.exp() * F.softplus(decay_NH + self.decay_bias)

    def _inputs(self, x_NI: Tensor) -> _Inputs:
        """The projections of the input, split; `grouped` checkpoints have them interleaved by key head."""
        c = self.config
        each, dim = c.value_heads // c.key_heads, c.key_dim
        if not c.grouped:
            return _Inputs(*x_NI.split_with_sizes(list(c.projections.values()), dim=-1))
        qkvz, ba = x_NI.split_with_sizes(list(c.projections.values()), dim=-1)
        value = each * c.value_dim
        q, k, v, z = by_head(c.key_heads, qkvz).split_with_sizes([dim, dim, value, value], dim=-1)
        b, a = by_head(c.key_heads, ba).split_with_sizes([each, each], dim=-1)
        mixed = torch.cat([t.flatten(1) for t in (q, k, v)], dim=-1)
        return _Inputs(mixed, z.flatten(1), b.flatten(1), a.flatten(1))

    def _heads(self, mixed_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [N, K, D] of length one, queries then scaled by D^-0.5; values [N, H, V]. Each key head
        serves H / K consecutive value heads."""
        c = self.config
        key = c.key_heads * c.key_dim
        q, k, v = mixed_NM.split_with_sizes([key, key, c.value_size], dim=-1)
        q_NKD, k_NKD = (_unit(by_head(c.key_heads, t)) for t in (q, k))
        return q_NKD * c.key_dim**-0.5, k_NKD, by_head(c.value_heads, v)

    def _gated(self, out_NHV: Tensor, gate_NM: Tensor) -> Tensor:
        """[N, H V]: RMSNorm within each head, times the gate."""
        normed = F.rms_norm(out_NHV, self.norm.shape, self.norm, self.norm_eps)
        return normed.flatten(1) * gate_NM


class _Inputs(NamedTuple):
    """`mixed` [N, M] queries, keys and values; `gate` [N, H V]; `rate` and `decay` [N, H]."""

    mixed: Tensor
    gate: Tensor
    rate: Tensor
    decay: Tensor


class _Tokens(NamedTuple):
    """The inputs of the rule for each token; `decay` are logarithms."""

    q_HND: Tensor
    k_HND: Tensor
    v_HNV: Tensor
    decay_HN: Tensor
    rate_HN: Tensor


def by_chunks(tokens: _Tokens, state_HDV: Tensor) -> tuple[Tensor, Tensor]:
    """out [H, N, V] and the state after N tokens (section 3.3 of the paper). Within a chunk, what each token adds to
    the state is the solution of a triangular system; from chunk to chunk only the state is passed on."""
    count = tokens.k_HND.shape[1]
    length = min(CHUNK, count)
    q, k, v, decay, rate = (chunked(t, length) for t in tokens)
    total_HCL1 = decay.cumsum(-2)
    last_HC11 = total_HCL1[..., -1:, :]
    between_HCLL = faded(total_HCL1)
    within_HCLL = q @ k.mT * between_HCLL
    system_HCLL = (k * rate) @ k.mT * between_HCLL
    wanted = torch.cat((v * rate, k * rate * total_HCL1.exp()), dim=-1)
    solved = torch.linalg.solve_triangular(system_HCLL, wanted, upper=False, unitriangular=True)
    values, keys = solved.split_with_sizes([v.shape[-1], k.shape[-1]], dim=-1)
    asking, adding, fading = q * total_HCL1.exp(), k * (last_HC11 - total_HCL1).exp(), last_HC11.exp()
    outs = []
    for c in range(k.shape[1]):
        new_HLV = values[:, c] - keys[:, c] @ state_HDV
        outs.append(asking[:, c] @ state_HDV + within_HCLL[:, c] @ new_HLV)
        state_HDV = state_HDV * fading[:, c] + adding[:, c].mT @ new_HLV
    return torch.cat(outs, dim=1)[:, :count], state_HDV


def _unit(x: Tensor) -> Tensor:
    """x scaled to length one along the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _TINY)
