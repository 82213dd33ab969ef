"""Scores of a prompt's tokens that a request asks for: logprobs, top-k tables, logprobs of chosen tokens, other draws.

The logits after prompt token i say what token i + 1 could have been, so row i of them scores position i + 1. A prefill
comes in pieces; `fill` takes the rows of one at a time. Filling a row twice gives the same. What it finds stays on the
device until `land`, so that a prefill need not wait for each chunk of rows.

Shapes: P prompt tokens, R rows, V vocabulary, K top tokens, J alternatives, M target cells.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from weft.wire.binary.sample_codec import EMPTY_LOGPROB, EMPTY_TOKEN, TopkLogprobs

from workers.generator.engine import AltTokens, GenerateRequest, Logprobs
from workers.generator.tokens.sampling import draw, prompt_rng
from workers.model.device import sent

#: Scores still on the device, and their place: an array and an index into it.
Coming = tuple[Tensor, npt.NDArray[Any], Any]


def land(scores: Iterable[PromptScores]) -> None:
    """Copy to the host what was filled in, with one copy for each dtype."""
    coming: list[Coming] = []
    for each in scores:
        coming += each.coming
        each.coming = []
    for dtype in {found.dtype for found, _, _ in coming}:
        own = [one for one in coming if one[0].dtype == dtype]
        flat = torch.cat([found.reshape(-1) for found, _, _ in own]).cpu().numpy()
        at = 0
        for found, array, index in own:
            array[index] = flat[at : at + found.numel()].reshape(tuple(found.shape))
            at += found.numel()


class PromptScores:
    """`first_row` is the first row of logits that is needed; the prompt's length when none is."""

    def __init__(self, request: GenerateRequest, vocab_size: int) -> None:
        length = len(request.prompt)
        self._request = request
        self.coming: list[Coming] = []
        last_n = request.prompt_logprobs_last_n
        #: The first row that scores the prompt's own tokens.
        self._own_row = 0 if last_n is None else max(0, length - 1 - last_n)
        self._top = min(request.topk_prompt_logprobs, vocab_size)
        self._alternatives = request.prompt_alt_tokens_k
        targets = request.target_tokens
        self._target_rows = np.zeros(0, np.int64) if targets is None else targets.rows
        self._target_ids = np.zeros(0, np.int64) if targets is None else targets.ids
        self.first_row = self._first_row(length)
        self._logprobs_P = np.full(length, np.nan, np.float32)
        self._top_ids_PK = np.full((length, self._top), EMPTY_TOKEN, np.int32)
        self._top_PK = np.full((length, self._top), EMPTY_LOGPROB, np.float32)
        self._targets_M = np.zeros(len(self._target_ids), np.float32)
        shape = (length - 1, self._alternatives)
        self._alt_ids_RJ, self._alt_RJ = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        self._uniform_RJ = prompt_rng(request.sampling.seed).random(shape) if self._alternatives else np.zeros(shape)

    def _first_row(self, length: int) -> int:
        rows = [length]
        if self._request.prompt_logprobs or self._top:
            rows.append(self._own_row)
        if self._alternatives:
            rows.append(0)
        named = self._target_rows[self._target_ids >= 0]
        return int(min([*rows, *named[:1]]))

    def fill(self, start: int, logits_RV: Tensor) -> None:
        """Take the logits of the rows from `start` on."""
        logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
        self._fill_own(start, logits_RV, logprobs_RV)
        self._fill_targets(start, logprobs_RV)
        if self._alternatives:
            self._fill_alternatives(start, logits_RV, logprobs_RV)

    def _fill_own(self, start: int, logits_RV: Tensor, logprobs_RV: Tensor) -> None:
        skipped = min(len(logprobs_RV), max(0, self._own_row - start))
        logprobs_RV, first = logprobs_RV[skipped:], start + skipped + 1
        positions = slice(first, first + len(logprobs_RV))
        tokens_R = sent(torch.tensor(self._request.prompt[positions], dtype=torch.long), logprobs_RV.device)
        self.coming.append((logprobs_RV.gather(1, tokens_R[:, None])[:, 0], self._logprobs_P, positions))
        if self._top:
            # rounding makes neighbouring logprobs equal, so logits are compared
            best_RK = logits_RV[skipped:].topk(self._top, dim=-1).indices
            self.coming.append((best_RK, self._top_ids_PK, positions))
            self.coming.append((logprobs_RV.gather(1, best_RK), self._top_PK, positions))

    def _fill_targets(self, start: int, logprobs_RV: Tensor) -> None:
        low, high = np.searchsorted(self._target_rows, [start, start + len(logprobs_RV)])
        cells_M = low + np.flatnonzero(self._target_ids[low:high] >= 0)
        if len(cells_M):
            rows_M = sent(torch.from_numpy(self._target_rows[cells_M] - start), logprobs_RV.device)
            ids_M = sent(torch.from_numpy(self._target_ids[cells_M]), logprobs_RV.device)
            self.coming.append((logprobs_RV[rows_M, ids_M], self._targets_M, cells_M))

    def _fill_alternatives(self, start: int, logits_RV: Tensor, logprobs_RV: Tensor) -> None:
        """Draws at the request's temperature from the whole distribution; their logprobs are at temperature 1."""
        rows = slice(start, start + len(logits_RV))
        temperature = self._request.sampling.temperature
        if temperature == 0:
            ids_RJ = logits_RV.argmax(-1, keepdim=True).expand(-1, self._alternatives)
        else:
            uniform_RJ = sent(torch.from_numpy(self._uniform_RJ[rows]), logits_RV.device)
            ids_RJ = draw(torch.log_softmax(logits_RV.float() / temperature, dim=-1), uniform_RJ)
        self.coming.append((ids_RJ, self._alt_ids_RJ, rows))
        self.coming.append((logprobs_RV.gather(1, ids_RJ), self._alt_RJ, rows))

    # What was found and has landed.

    @property
    def logprobs(self) -> Logprobs | None:
        return self._logprobs_P if self._request.prompt_logprobs else None

    @property
    def topk(self) -> TopkLogprobs | None:
        return TopkLogprobs(self._top_ids_PK, self._top_PK) if self._top else None

    @property
    def targets(self) -> Logprobs | None:
        return None if self._request.target_tokens is None else self._targets_M

    @property
    def alternatives(self) -> AltTokens | None:
        return (self._alt_ids_RJ, self._alt_RJ) if self._alternatives else None
