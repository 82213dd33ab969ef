"""Rotary position embedding (RoFormer, arXiv 2104.09864), with default, linear, llama3 or YaRN frequencies, over the
whole head or its first part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from workers.model.config import RopeConfig

#: How many positions the table of angles grows by at a time.
BLOCK = 256

#: cos and sin of each token's angles, [T, 1, turned] each.
Angles = tuple[Tensor, Tensor]


class Rotary(nn.Module):
    """The angles of a model's positions."""

    def __init__(self, rope: RopeConfig, head_dim: int, context_length: int) -> None:
        super().__init__()
        self._rope, self._context_length = rope, context_length
        turned = int(head_dim * rope.partial)
        self.inverse_wavelengths = nn.Buffer(frequencies(rope, turned), persistent=False)
        self._angles: Tensor = nn.Buffer(torch.empty(2, 0, turned), persistent=False)

    def forward(self, positions_T: Tensor) -> Angles:
        """cos and sin of each token's angles, read from a table that grows by whole blocks. Computing them per batch
        would break isolation: a vectorised cos rounds differently at the end of a tensor, so a position's value would
        depend on where its token stands in the batch. On a CUDA device the table has all positions of the context from
        the start, since reading the largest position would wait for the device."""
        while self._last(positions_T) >= self._angles.shape[1]:
            with torch.inference_mode(False), torch.no_grad():
                start = self._angles.shape[1]
                positions = torch.arange(start, start + BLOCK, device=self._angles.device).float()
                angles = positions[:, None] * self.inverse_wavelengths
                turn = torch.cat((angles, angles), dim=-1)
                both = torch.stack((turn.cos(), turn.sin())) * self._rope.attention_factor
                self._angles = torch.cat((self._angles, both), dim=1)
        cos, sin = self._angles.index_select(1, positions_T)
        return cos[:, None], sin[:, None]

    def _last(self, positions_T: Tensor) -> int:
        """The largest position that the table must have."""
        if positions_T.is_cuda:
            return self._context_length - 1
        return int(positions_T.max()) if len(positions_T) else 0


def turn(x_THD: Tensor, angles: Angles) -> Tensor:
    """Rotate the first part of each head, as wide as the angles; the rest is unchanged. Number j is rotated with number
    j + half of the width."""
    cos, sin = angles
    turned = cos.shape[-1]
    if not turned:
        return x_THD
    part = x_THD if turned == x_THD.shape[-1] else x_THD[..., :turned]
    first, second = part.chunk(2, dim=-1)
    out = part * cos + torch.cat((-second, first), dim=-1) * sin
    return out if turned == x_THD.shape[-1] else torch.cat((out, x_THD[..., turned:]), dim=-1)


def pairs_apart(x_THD: Tensor) -> Tensor:
    """Reorder heads whose rotated pairs are neighbours (0, 1), (2, 3), ..., so that `turn` finds the two halves of a
    pair apart."""
    return torch.cat((x_THD[..., ::2], x_THD[..., 1::2]), dim=-1)


def frequencies(rope: RopeConfig, turned: int) -> Tensor:
    """Radians per position for each of the turned / 2 pairs."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, turned, 2, dtype=torch.int64).float() / turned))
    return {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[rope.kind](plain, rope)


def _default(plain: Tensor, rope: RopeConfig) -> Tensor:
    return plain


def _linear(plain: Tensor, rope: RopeConfig) -> Tensor:
    return plain / rope.factor


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: wavelengths longer than the original context are stretched by `factor`, short ones are kept, and those
    between are blended."""
    wavelength = 2 * math.pi / plain
    longest = rope.original_context_length / rope.low_freq_factor
    shortest = rope.original_context_length / rope.high_freq_factor
    blend = (rope.original_context_length / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, stretched)


def _yarn(plain: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN (arXiv 2309.00071): pairs that rotate more than `beta_fast` times in the original context are kept, those
    that rotate less than `beta_slow` times are stretched by `factor`, and those between are blended by their index."""
    planes = len(plain)

    def plane(turns: float) -> float:
        length = rope.original_context_length / (turns * 2 * math.pi)
        return 2 * planes * math.log(length) / (2 * math.log(rope.theta))

    low, high = plane(rope.beta_fast), plane(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * planes - 1)
    ramp = (torch.arange(planes, dtype=torch.float32) - low) / ((high - low) or 0.001)
    stretched = ramp.clamp(0, 1)
    return plain / rope.factor * stretched + plain * (1 - stretched)
