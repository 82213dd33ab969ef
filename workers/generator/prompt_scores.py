"""Scores of a prompt's tokens that a request asks for: logprobs, top-k tables, logprobs of chosen tokens, other draws.

The logits after prompt token i say what token i + 1 could have been, so row i of them scores position i + 1. A prefill
comes in pieces; `fill` takes the rows of one at a time. Filling a row twice gives the same.

Shapes: P prompt tokens, R rows, V vocabulary, K top tokens, J alternatives, M target cells.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from weft.wire.sample_codec import EMPTY_LOGPROB, EMPTY_TOKEN

from workers.generator.engine import AltTokens, GenerateRequest, Logprobs, TopkLogprobs
from workers.generator.sampling import draw, prompt_rng


class PromptScores:
    """`first_row` is the first row of logits that is needed; the prompt's length when none is."""

    def __init__(self, request: GenerateRequest, vocab_size: int) -> None:
        length = len(request.prompt)
        self._request = request
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
        self._fill_own(start, logprobs_RV)
        self._fill_targets(start, logprobs_RV)
        if self._alternatives:
            self._fill_alternatives(start, logits_RV, logprobs_RV)

    def _fill_own(self, start: int, logprobs_RV: Tensor) -> None:
        skipped = min(len(logprobs_RV), max(0, self._own_row - start))
        logprobs_RV, first = logprobs_RV[skipped:], start + skipped + 1
        positions = slice(first, first + len(logprobs_RV))
        tokens_R = torch.tensor(self._request.prompt[positions], dtype=torch.long, device=logprobs_RV.device)
        self._logprobs_P[positions] = logprobs_RV.gather(1, tokens_R[:, None])[:, 0].cpu().numpy()
        if self._top:
            best = logprobs_RV.topk(self._top, dim=-1)
            self._top_ids_PK[positions] = best.indices.cpu().numpy()
            self._top_PK[positions] = best.values.cpu().numpy()

    def _fill_targets(self, start: int, logprobs_RV: Tensor) -> None:
        low, high = np.searchsorted(self._target_rows, [start, start + len(logprobs_RV)])
        cells_M = low + np.flatnonzero(self._target_ids[low:high] >= 0)
        rows_M = torch.from_numpy(self._target_rows[cells_M] - start).to(logprobs_RV.device)
        ids_M = torch.from_numpy(self._target_ids[cells_M]).to(logprobs_RV.device)
        self._targets_M[cells_M] = logprobs_RV[rows_M, ids_M].cpu().numpy()

    def _fill_alternatives(self, start: int, logits_RV: Tensor, logprobs_RV: Tensor) -> None:
        """Draws at the request's temperature from the whole distribution; their logprobs are at temperature 1."""
        rows = slice(start, start + len(logits_RV))
        temperature = self._request.sampling.temperature
        if temperature == 0:
            ids_RJ = logits_RV.argmax(-1, keepdim=True).expand(-1, self._alternatives)
        else:
            uniform_RJ = torch.from_numpy(self._uniform_RJ[rows]).to(logits_RV.device)
            ids_RJ = draw(torch.log_softmax(logits_RV.float() / temperature, dim=-1), uniform_RJ)
        self._alt_ids_RJ[rows] = ids_RJ.cpu().numpy()
        self._alt_RJ[rows] = logprobs_RV.gather(1, ids_RJ).cpu().numpy()

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
