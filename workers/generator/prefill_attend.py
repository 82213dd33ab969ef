"""Attention of a prefill: pieces of prompts, each over its sequence's positions up to its end.

The result of a block must depend on the prompt up to its end alone: not on what else is in the pass, nor on whether the
blocks before it were computed in this pass, in an earlier one, or copied from the prefix cache. So each block is a call
of its own, whose shape depends only on its place in the prompt, over the sequence's keys and values.

Shapes: T packed tokens, N rows of a block, K kv heads, G query heads per kv head, D head dim, L length attended to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.generator.kv_cache import KVCache
from workers.generator.prefix_cache import BLOCK_TOKENS


@dataclass(frozen=True)
class Piece:
    """Positions start:stop of the prompt of a sequence with these pages; `start` is a multiple of BLOCK_TOKENS."""

    pages: Sequence[int]
    start: int
    stop: int

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of the whole blocks, and of the incomplete one at the end."""
        for start in range(self.start, self.stop, BLOCK_TOKENS):
            yield start, min(start + BLOCK_TOKENS, self.stop)


class PrefillAttend:
    """The `Attend` of one prefill; the pieces follow each other in T."""

    def __init__(self, cache: KVCache, pieces: Sequence[Piece]) -> None:
        self._cache = cache
        self._pieces = pieces
        ahead_NN = torch.full((BLOCK_TOKENS, BLOCK_TOKENS), -torch.inf, device=cache.device)
        self._ahead_NN = ahead_NN.triu_(1).to(cache.k_NKDP[0].dtype)

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out_THD = torch.empty_like(q_THD)
        at = 0
        for piece in self._pieces:
            rows = slice(at, at + piece.stop - piece.start)
            self._cache.write(layer, piece.pages, piece.start, k_TKD[rows], v_TKD[rows])
            k_KDL, v_KLD = self._cache.read(layer, piece.pages, piece.stop)
            for start, stop in piece.blocks():
                block = slice(at, at + stop - start)
                out_THD[block] = self._attend_block(q_THD[block], k_KDL[:, :, :stop], v_KLD[:, :stop])
                at = block.stop
        return out_THD

    def _attend_block(self, q_NHD: Tensor, k_KDL: Tensor, v_KLD: Tensor) -> Tensor:
        """Causal attention of the last N of L positions."""
        rows, heads, head_dim = q_NHD.shape
        kv_heads, length, _ = v_KLD.shape
        ahead_NN = self._ahead_NN[:rows, :rows]
        if q_NHD.dtype != torch.float32:  # the fused kernel keeps the scores in float32
            mask_NL = F.pad(ahead_NN, (length - rows, 0))
            q_KGND = q_NHD.transpose(0, 1)[None]
            k_KLD = k_KDL.transpose(1, 2).contiguous()
            out = F.scaled_dot_product_attention(q_KGND, k_KLD[None], v_KLD[None], attn_mask=mask_NL, enable_gqa=True)
            return out[0].transpose(0, 1)
        groups = heads // kv_heads
        q_KMD = q_NHD.view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        scores_KML = torch.bmm(q_KMD, k_KDL).mul_(head_dim**-0.5)
        scores_KML.view(kv_heads, groups, rows, length)[..., length - rows :] += ahead_NN
        out_KMD = torch.bmm(torch.softmax(scores_KML, dim=-1), v_KLD)
        return out_KMD.view(kv_heads, groups, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, heads, head_dim)
