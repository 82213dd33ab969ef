"""Attention of a prefill where attend.c does not compute it: pieces of prompts, each over its positions so far.

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

from workers.generator.cache.kv_cache import KVCache
from workers.generator.cache.page_groups import Held
from workers.generator.cache.prefix_cache import BLOCK_TOKENS
from workers.model.attend import ALL, Reach
from workers.model.recur import Recur, Recurrence


@dataclass(frozen=True)
class Piece:
    """Positions start:stop of the prompt of a sequence with these pages, of each group of layers; `start` is a multiple
    of BLOCK_TOKENS."""

    pages: Sequence[Held]
    start: int
    stop: int

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of the whole blocks, and of the incomplete one at the end."""
        for start in range(self.start, self.stop, BLOCK_TOKENS):
            yield start, min(start + BLOCK_TOKENS, self.stop)


class PrefillAttend:
    """The `Attend` of one prefill; the pieces follow each other in T. `recur`: in models that have recurrent layers."""

    latent = True

    def __init__(self, cache: KVCache, pieces: Sequence[Piece], recur: Recur | None = None) -> None:
        self._recur = recur
        self._cache = cache
        self._pieces = pieces
        ahead_NN = torch.full((BLOCK_TOKENS, BLOCK_TOKENS), -torch.inf, device=cache.device)
        self._ahead_NN = ahead_NN.triu_(1).to(cache.k_NKDP[0].dtype)

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, reach: Reach = ALL) -> Tensor:
        out_THD = q_THD.new_empty(*q_THD.shape[:2], v_TKD.shape[2])
        at = 0
        for piece in self._pieces:
            rows = slice(at, at + piece.stop - piece.start)
            held = piece.pages[self._cache.group_of[layer]]
            self._cache.write(layer, held.pages, piece.start - held.start, k_TKD[rows], v_TKD[rows])
            k_KDL, v_KLD = self._cache.read(layer, held.pages, piece.stop - held.start)
            for start, stop in piece.blocks():
                block = slice(at, at + stop - start)
                if reach.all_of(stop):
                    out_THD[block] = self._attend_block(q_THD[block], k_KDL[:, :, :stop], v_KLD[:, :stop])
                else:
                    first = max(0, start + 1 - reach.window) if reach.window else 0
                    seen = slice(first - held.start, stop - held.start)
                    keys, values = k_KDL[:, :, seen], v_KLD[:, seen]
                    out_THD[block] = self._reaching_block(q_THD[block], keys, values, reach)
                at = block.stop
        return out_THD

    def recur(self, layer: int, recurrence: Recurrence, x_TI: Tensor, *, apart: bool) -> Tensor:
        assert self._recur is not None
        return self._recur.recur(layer, recurrence, x_TI, apart=apart)

    def _attend_block(self, q_NHD: Tensor, k_KDL: Tensor, v_KLD: Tensor) -> Tensor:
        """Causal attention of the last N of L positions."""
        rows, length = len(q_NHD), v_KLD.shape[1]
        ahead_NN = self._ahead_NN[:rows, :rows]
        if q_NHD.dtype != torch.float32:  # the fused kernel keeps the scores in float32
            mask_NL = F.pad(ahead_NN, (length - rows, 0))
            q_KGND = q_NHD.transpose(0, 1)[None]
            k_KLD = k_KDL.transpose(1, 2).contiguous()
            out = F.scaled_dot_product_attention(q_KGND, k_KLD[None], v_KLD[None], attn_mask=mask_NL, enable_gqa=True)
            return out[0].transpose(0, 1)
        scores_KGNL = self._scores(q_NHD, k_KDL)
        scores_KGNL[..., length - rows :] += ahead_NN
        return _mixed(torch.softmax(scores_KGNL, dim=-1), v_KLD)

    def _scores(self, q_NHD: Tensor, k_KDL: Tensor) -> Tensor:
        """The scores q k / sqrt(D), without a mask."""
        (rows, heads, head_dim), (kv_heads, _, length) = q_NHD.shape, k_KDL.shape
        q_KGND = q_NHD.view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
        scores_KML = torch.bmm(q_KGND.reshape(kv_heads, -1, head_dim), k_KDL).mul_(head_dim**-0.5)
        return scores_KML.view(kv_heads, heads // kv_heads, rows, length)

    def _reaching_block(self, q_NHD: Tensor, k_KDL: Tensor, v_KLD: Tensor, reach: Reach) -> Tensor:
        """Attention of the last N of L positions within a window, or with sinks, in float32."""
        rows, length = len(q_NHD), v_KLD.shape[1]
        scores_KGNL = self._scores(q_NHD.float(), k_KDL.float())
        at = torch.arange(length, device=q_NHD.device)
        own = at[length - rows :, None]
        unseen_NL = at[None] > own
        if reach.window:
            unseen_NL |= at[None] <= own - reach.window
        scores_KGNL.masked_fill_(unseen_NL, -torch.inf)
        weights_KGNL = softmax_beside(scores_KGNL, reach.sinks_H)
        return _mixed(weights_KGNL, v_KLD.float()).to(q_NHD.dtype)


def softmax_beside(scores_KGNL: Tensor, sinks_H: Tensor | None) -> Tensor:
    """softmax over L and each head's sink, whose share goes to no position."""
    if sinks_H is None:
        return torch.softmax(scores_KGNL, dim=-1)
    kv_heads, groups, rows, _ = scores_KGNL.shape
    sinks_KGN1 = sinks_H.view(kv_heads, groups, 1, 1).expand(-1, -1, rows, 1)
    return torch.softmax(torch.cat((scores_KGNL, sinks_KGN1), dim=-1), dim=-1)[..., :-1]


def _mixed(weights_KGNL: Tensor, v_KLD: Tensor) -> Tensor:
    """The values of each head, weighted: [N, H, D]."""
    kv_heads, groups, rows, _ = weights_KGNL.shape
    out_KMD = torch.bmm(weights_KGNL.flatten(1, 2), v_KLD)
    return out_KMD.view(kv_heads, groups, rows, -1).permute(2, 0, 1, 3).reshape(rows, kv_heads * groups, -1)
