"""From logits to tokens, for many rows at once; and each sequence's own random numbers.

A row's token depends on its logits, its parameters and its one uniform number only: nothing here mixes rows, so a
sequence draws the same tokens alone and in any batch. On a device all is computed before anything is read, in one copy.

Shapes: R rows (sequences), V vocabulary, K kept candidates.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.generator.engine import SamplingParams
from workers.model.device import sent

#: exp of this is about the smallest normal float64.
SMALLEST = -708.0
#: A sum of a vocabulary's probabilities in float64 is within this of the exact one.
ROUNDING = 1e-10


#: How many numbers one step of the counter yields.
BLOCK = 4


def sequence_rng(seed: int | None, sample: int, position: int = 0) -> np.random.Generator:
    """The uniform numbers of one sequence from `position` on: counter-based, keyed by (seed, sample index), so that a
    sample that goes on from prompt + partial draws what the first would have drawn. No seed: a fresh key."""
    key = secrets.randbits(64) if seed is None else seed & 0xFFFF_FFFF_FFFF_FFFF
    counter, used = divmod(position, BLOCK)
    rng = np.random.Generator(np.random.Philox(counter=counter, key=np.array([key, sample], dtype=np.uint64)))
    rng.random(used)
    return rng


def prompt_rng(seed: int | None) -> np.random.Generator:
    """The uniform numbers for draws along a prompt, keyed by a sample index that no sequence has."""
    return sequence_rng(seed, 2**64 - 1)


@dataclass(frozen=True)
class Draw:
    """A token, its logprob, and the likeliest tokens beside it (ids and logprobs) where they are asked for."""

    token: int
    logprob: float
    top: tuple[list[int], list[float]] | None = None


@dataclass(frozen=True)
class SamplingRows:
    """The parameters of R rows as tensors, built once per batch composition and used for many steps."""

    divisor_R: Tensor  # temperature, or 1 for greedy rows: logprobs are those of softmax(logits / divisor)
    greedy: Tensor  # rows that take the most probable token
    free: Tensor  # rows that draw from the whole vocabulary
    cut: Tensor  # rows that draw after top-k / top-p
    top_k_C: Tensor  # of the `cut` rows; the vocabulary size where off
    top_p_C: Tensor
    most: int  # the largest of top_k_C
    tops: list[int]  # the number of likeliest tokens to return for each row
    asking: Tensor  # rows that return any

    @staticmethod
    def of(
        params: Sequence[SamplingParams], vocab_size: int, device: torch.device, tops: Sequence[int] | None = None
    ) -> SamplingRows:
        greedy = [row for row, p in enumerate(params) if p.temperature == 0]
        cut = [row for row, p in enumerate(params) if p.temperature != 0 and _cuts(p, vocab_size)]
        whole = set(range(len(params))) - set(greedy) - set(cut)
        top_k = [min(params[row].top_k, vocab_size) if params[row].top_k > 0 else vocab_size for row in cut]
        tops = [0] * len(params) if tops is None else list(tops)

        def numbers(of: Collection[int]) -> Tensor:
            return sent(torch.tensor(list(of), dtype=torch.long), device)

        return SamplingRows(
            divisor_R=sent(torch.tensor([p.temperature or 1.0 for p in params]), device),
            greedy=numbers(greedy),
            free=numbers(sorted(whole)),
            cut=numbers(cut),
            top_k_C=numbers(top_k),
            top_p_C=sent(torch.tensor([params[row].top_p for row in cut], dtype=torch.float64), device),
            most=max(top_k, default=0),
            tops=tops,
            asking=numbers([row for row, top in enumerate(tops) if top]),
        )


def _cuts(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0


def sample(logits_RV: Tensor, rows: SamplingRows, uniforms: Sequence[float]) -> list[Draw]:
    """Draw one token per row; its logprob is that before any cut. A row whose logits are not finite gets a logprob that
    is not finite either, and a meaningless token."""
    return drawn(chosen(logits_RV, rows, uniforms).tolist(), rows)  # the only wait for the device


def drawn(numbers: Sequence[float], rows: SamplingRows) -> list[Draw]:
    """The draws in the result of `chosen`, row by row."""
    count, asking, most = len(rows.tops), len(rows.asking), max(rows.tops, default=0)
    tokens, logprobs, tables = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    ids, values = iter(tables[: asking * most]), iter(tables[asking * most :])
    draws = []
    for token, logprob, top in zip(tokens, logprobs, rows.tops, strict=True):
        table = None
        if top:
            best, theirs = list(islice(ids, most)), list(islice(values, most))
            table = [int(each) for each in best[:top]], theirs[:top]
        draws.append(Draw(int(token), logprob, table))
    return draws


def chosen(logits_RV: Tensor, rows: SamplingRows, uniforms: Sequence[float]) -> Tensor:
    """The results of `sample` as one tensor, without waiting: the token of each row, then the logprob of each, then for
    the rows that are `asking` the ids, and then the logprobs, of as many likeliest tokens as any of them asks for.
    float64 holds all of them exactly."""
    logprobs_RV = torch.log_softmax(logits_RV.float() / rows.divisor_R[:, None], dim=-1)
    uniform_R = sent(torch.tensor(uniforms, dtype=torch.float64), logits_RV.device)
    tokens_R = torch.empty(len(uniforms), dtype=torch.long, device=logits_RV.device)
    if len(rows.greedy):
        tokens_R[rows.greedy] = _rows(logits_RV, rows.greedy).argmax(-1)
    if len(rows.free):
        tokens_R[rows.free] = _draw_one(_rows(logprobs_RV, rows.free), uniform_R[rows.free])
    if len(rows.cut):
        own = _rows(logits_RV, rows.cut), _rows(logprobs_RV, rows.cut)
        logprobs_CK, ids_CK = truncate(*own, rows.top_k_C, rows.top_p_C, rows.most)
        drawn_C = _draw_one(logprobs_CK, uniform_R[rows.cut])
        tokens_R[rows.cut] = ids_CK.gather(1, drawn_C[:, None])[:, 0]
    parts = [tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]]
    if len(rows.asking):
        best_AK = _rows(logits_RV, rows.asking).topk(max(rows.tops), dim=-1).indices
        parts += [best_AK.flatten(), _rows(logprobs_RV, rows.asking).gather(1, best_AK).flatten()]
    return torch.cat([part.double() for part in parts])


def _rows(matrix_RV: Tensor, rows: Tensor) -> Tensor:
    """The given ascending rows, without a copy when they are all rows."""
    return matrix_RV if len(rows) == matrix_RV.shape[0] else matrix_RV[rows]


def _draw_one(logprobs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    return draw(logprobs_RV, uniform_R[:, None])[:, 0]


def draw(logprobs_RV: Tensor, uniform_RN: Tensor) -> Tensor:
    """Invert the cumulative distribution of each row (which need not be normalised) at N uniforms in [0, 1): ids_RN.

    Sums run in float64: in float32 the tail of a large vocabulary would be lost. Probabilities below the normal floats
    count as zero: processors take a hundred times as long for each of them.
    """
    cumulative_RV = F.threshold(logprobs_RV.double(), SMALLEST, -torch.inf).exp().cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]
    # The product may round up to the total; the largest float below that selects the last token with any mass.
    threshold_RN = torch.minimum(uniform_RN * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    index_RN = torch.searchsorted(cumulative_RV, threshold_RN.contiguous(), right=True)
    return index_RN.clamp_(max=logprobs_RV.shape[-1] - 1)  # for rows with NaN, which the caller drops


def truncate(
    logits_CV: Tensor, logprobs_CV: Tensor, top_k_C: Tensor, top_p_C: Tensor, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """The candidates of each row, most probable first: (logprobs_CK with -inf for what is cut, token ids_CK).

    Top-k keeps the k most probable tokens; top-p then keeps the smallest prefix of them whose renormalised probability
    reaches p. The most probable token always stays. Equally probable tokens rank by id. They are ranked by their
    logits, as a greedy row is: logprobs are larger numbers, and round neighbours to one. `most`: the largest k; if the
    caller gives it, the device need not be asked.
    """
    width = max(1, int(top_k_C.max()) if most is None else most)
    ids_CK = torch.sort(logits_CV, dim=-1, descending=True, stable=True).indices[:, :width]
    sorted_CK = logprobs_CV.gather(1, ids_CK)
    rank_K = torch.arange(width, device=logprobs_CV.device)
    sorted_CK.masked_fill_(rank_K[None] >= top_k_C[:, None], -torch.inf)
    reached_CK = sorted_CK.double().exp().cumsum(-1)
    beyond_CK = torch.zeros_like(reached_CK, dtype=torch.bool)
    # What is before a candidate, as it was summed, of which the last bits are rounding: three of ten equals reach 0.3.
    beyond_CK[:, 1:] = reached_CK[:, :-1] >= (1 - ROUNDING) * top_p_C[:, None] * reached_CK[:, -1:]
    return sorted_CK.masked_fill_(beyond_CK & (top_p_C < 1.0)[:, None], -torch.inf), ids_CK
