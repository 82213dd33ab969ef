"""Mamba-2 (arXiv 2405.21060) with its causal convolution and its norm, gated and by groups.

For each head, with value x, a step dt of each token, and b and c of the head's group, the state S [D, V] becomes exp(dt
A) S + b (dt x)^T, and the output is S^T c + skip x. Many tokens are computed in chunks, as in section 6 of the paper; a
single token by the formula itself. All in float32.

Steps have no lower bound, as in the published code and in training. transformers 5 raises them to `time_step_min` when
it computes many tokens, but not when it computes one; its pull request 48989 calls that a fault.

Shapes: N tokens of a sequence, R sequences, M channels of the convolution, J its taps, G groups, H heads, D state dim,
V head dim, C chunks, L tokens of a chunk.
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


class Mamba2(Recurrent):
    """The projection of the input is one linear: gate, values, b and c, steps. Tinker's adapters have an A and a B each
    for the gate and for the values, and leave the rest unchanged; those of other tools may have one pair for the whole.
    A state is the last J - 1 inputs of the convolution and S of each head."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        assert config.mamba is not None
        super().__init__(config, layer, config.mamba)
        c, d = config.mamba, config.hidden_size
        self.config = c
        self.inputs = frozen(dtype, c.in_size, d)
        self.conv = frozen(torch.float32, c.mixed_size, c.taps)
        self.conv_bias = frozen(torch.float32, c.mixed_size)
        self.decay_log = frozen(torch.float32, c.heads)
        self.step_bias = frozen(torch.float32, c.heads)
        self.skip = frozen(torch.float32, c.heads)
        self.norm = frozen(torch.float32, c.value_size)
        self.out = frozen(dtype, d, c.value_size)

    def run(self, x_NI: Tensor, state: State | None) -> tuple[Tensor, State]:
        c = self.config
        gate, mixed, step = self._inputs(x_NI)
        before_JM, start_HDV = state or self._begin(x_NI)
        seen_M = torch.cat((before_JM, mixed))
        taps = [seen_M[j : j + len(x_NI)] for j in range(c.taps)]
        x_NHV, b_NGD, c_NGD = self._parts(F.silu(convolved(taps, self.conv, self.conv_bias)))
        step_NH = F.softplus(step + self.step_bias)
        decay_NH = -self.decay_log.exp() * step_NH
        tokens = _Tokens(*(t.transpose(0, 1) for t in (x_NHV * step_NH[..., None], b_NGD, c_NGD, decay_NH)))
        out_HNV, end_HDV = by_chunks(tokens, start_HDV)
        y = self._gated(out_HNV.transpose(0, 1) + self.skip[:, None] * x_NHV, F.silu(gate))
        return y, (seen_M[len(x_NI) :], end_HDV)

    def step(self, x_RI: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        gate, mixed, step = self._inputs(x_RI)
        before_RJM = torch.stack([before_JM for before_JM, _ in states])
        seen_RJM = torch.cat((before_RJM, mixed[:, None]), dim=1)
        x_RHV, b_RGD, c_RGD = self._parts(steady(F.silu, convolved(seen_RJM.unbind(1), self.conv, self.conv_bias)))
        step_RH = steady(F.softplus, step + self.step_bias)
        kept_RH = steady(torch.exp, -self.decay_log.exp() * step_RH)
        tokens = Tokens(c_RGD, b_RGD, x_RHV * step_RH[..., None], kept_RH)
        out_RHV, ends_HDV = one_token(tokens, [start_HDV for _, start_HDV in states], packs=self.packs)
        y = self._gated(out_RHV + self.skip[:, None] * x_RHV, steady(F.silu, gate))
        return y, list(zip(seen_RJM[:, 1:].unbind(), ends_HDV, strict=True))

    def run_packed(
        self, x_TI: Tensor, packed: Packed, states: Sequence[State | None] | None
    ) -> tuple[Tensor, list[State]]:
        gate, mixed, step = self._inputs(x_TI)
        befores_JM, starts_HDV = begun(states, self._begin(x_TI))
        mixed, ends_JM = fla.convolved(mixed, self.conv, self.conv_bias, packed, befores_JM)
        x_THV, b_TGD, c_TGD = self._parts(mixed)
        step_TH = F.softplus(step + self.step_bias)
        decay_TH = -self.decay_log.exp() * step_TH
        out_THV, ends_HDV = fla.scan(x_THV * step_TH[..., None], b_TGD, c_TGD, decay_TH, packed, starts_HDV)
        y = self._gated(out_THV + self.skip[:, None] * x_THV, F.silu(gate))
        return y, list(zip(ends_JM, ends_HDV, strict=True))

    def _begin(self, x: Tensor) -> State:
        """The state of a sequence that begins: zeros."""
        c = self.config
        return x.new_zeros(c.taps - 1, c.mixed_size), x.new_zeros(c.heads, c.state_dim, c.head_dim)

    def _inputs(self, x_NI: Tensor) -> tuple[Tensor, ...]:
        """The gate [N, H V], the convolution's input [N, M], and the steps before their bias [N, H]."""
        c = self.config
        return x_NI.split_with_sizes([c.value_size, c.mixed_size, c.heads], dim=-1)

    def _parts(self, mixed_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values [N, H, V]; b and c of each group, [N, G, D] each."""
        c = self.config
        shared = c.groups * c.state_dim
        x, b, read_by = mixed_NM.split_with_sizes([c.value_size, shared, shared], dim=-1)
        return by_head(c.heads, x), by_head(c.groups, b), by_head(c.groups, read_by)

    def _gated(self, out_NHV: Tensor, gate_NM: Tensor) -> Tensor:
        """[N, H V]: the output times the gate, then RMSNorm within each group of heads."""
        by_group = by_head(self.config.groups, out_NHV.flatten(1) * gate_NM)
        return F.rms_norm(by_group, by_group.shape[2:], None, self.norm_eps).flatten(1) * self.norm


class _Tokens(NamedTuple):
    """The inputs of the recurrence for each token: x dt, b and c, and the decays' logarithms dt A."""

    x_HNV: Tensor
    b_GND: Tensor
    c_GND: Tensor
    decay_HN: Tensor


def by_chunks(tokens: _Tokens, state_HDV: Tensor) -> tuple[Tensor, Tensor]:
    """out [H, N, V] and the state after N tokens (section 6 of the paper). Within a chunk this is attention with a
    decay; from chunk to chunk only the state is passed on."""
    (heads, count), groups = tokens.decay_HN.shape, len(tokens.b_GND)
    length, each = min(CHUNK, count), heads // groups
    x, b, c, decay = (chunked(t, length) for t in tokens)
    total_HCL1 = decay.cumsum(-2)
    last_HC11 = total_HCL1[..., -1:, :]
    within_HCLL = (c @ b.mT).repeat_interleave(each, 0) * faded(total_HCL1)
    b, c = (t.repeat_interleave(each, 0) for t in (b, c))
    asking, fading = c * total_HCL1.exp(), last_HC11.exp()
    written_HCDV = (b * (last_HC11 - total_HCL1).exp()).mT @ x
    out_HCLV, outs = within_HCLL @ x, []
    for n in range(x.shape[1]):
        outs.append(out_HCLV[:, n] + asking[:, n] @ state_HDV)
        state_HDV = state_HDV * fading[:, n] + written_HCDV[:, n]
    return torch.cat(outs, dim=1)[:, :count], state_HDV
