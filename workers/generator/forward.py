"""The model passes of TorchEngine: pieces of prompts packed into one prefill, and one token for every running sequence.

After a pass that raised, it may be repeated for fewer requests: writing the same keys and values to the same pages
twice is harmless, and so is scoring the same rows of a prompt twice. States of recurrent layers are read and never
written: a prefill adds those it reaches to the request's, a step leaves them in its plan until they are taken over.

A prefill treats every block of a prompt (BLOCK_TOKENS at a multiple of BLOCK_TOKENS) alike, bit for bit, whichever
piece it comes in: its products with an adapter, and its attention where C does not compute that row by row, are calls
of their own, of a shape that follows from its place in the prompt; products with the base weights give a row the same
bits in any company (`workers.model.lora.linear`).
On a device all prompts are one launch instead, in which kernels sum each row by itself (`gpu/prefill.py`).

Shapes: T packed tokens, R rows that need logits, V vocabulary, N tokens of a piece, G groups of layers, W pages
of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from workers.generator.attention.decode_attend import DecodeAttend, native_kernel
from workers.generator.attention.prefill_attend import Piece, PrefillAttend
from workers.generator.attention.recur import DecodeRecur, PrefillRecur
from workers.generator.cache.kv_cache import KVCache, pages_of
from workers.generator.cache.prefix_cache import BLOCK_TOKENS
from workers.generator.cache.states import States
from workers.generator.requests.progress import RequestProgress, Row, SequenceProgress
from workers.generator.tokens.sampling import SamplingRows
from workers.model.attend import Attend
from workers.model.decoder import Decoder
from workers.model.device import sent
from workers.model.lora.rows import LoraRows
from workers.model.mixture.mixture import OnRoute
from workers.model.planning.plan import SCORED_LOGITS

#: How many logits (rows x vocabulary) are computed at a time to score a prompt, to bound memory. A device computes more
#: (SCORED_LOGITS, which are planned for), since every chunk there is a launch of each operation.
MAX_LOGITS = 1 << 24


class DecodePlan:
    """The plan of decode steps for a fixed set of running sequences, sorted by adapter, so that each adapter is read
    from memory once. Each sequence has a row for its newest token and one for each token of its draft. It is valid as
    long as the set, the adapters and the lengths of drafts stay the same."""

    def __init__(
        self, sequences: Iterable[SequenceProgress], decoder: Decoder, cache: KVCache, *, context: int
    ) -> None:
        self.sequences = sorted(sequences, key=_adapter_order)
        self.drafted = [len(sequence.draft) for sequence in self.sequences]
        self.rows = [
            Row(sequence, ahead)
            for sequence, drafted in zip(self.sequences, self.drafted, strict=True)
            for ahead in range(1 + drafted)
        ]
        self.lora = lora_rows(decoder, [(row.owner, 1) for row in self.rows])
        self.sampling = sampling_rows(self.rows, decoder.config.vocab_size, cache.device)
        self.versions = [row.owner.version for row in self.rows]
        self.routed = any(row.owner.request.return_routed_experts for row in self.rows)
        #: By group and row: the row's pages, followed by page 0, and preceded by the first page that it has.
        self.table_GRW = np.zeros((cache.groups, len(self.rows), pages_of(context)), dtype=np.int32)
        self._known = [[(0, 0)] * len(self.rows) for _ in range(cache.groups)]
        #: The states of each row after the step in progress.
        self.after: list[States] = []

    @property
    def valid(self) -> bool:
        """True if each sequence's draft is as long as when this step was planned."""
        return self.drafted == [len(sequence.draft) for sequence in self.sequences]

    @property
    def next_rows(self) -> list[Row]:
        """The rows of the step after the one that is under way; without drafts."""
        return [Row(sequence, 1) for sequence in self.sequences]

    def turn_pages(self) -> None:
        """Update the page table with pages that sequences have got, or given back, since the last call."""
        for i, row in enumerate(self.rows):
            for group, held in enumerate(row.pages):
                known = (held.gone, len(held.pages))
                if known != self._known[group][i]:
                    self._known[group][i] = known
                    own_W = self.table_GRW[group, i]
                    own_W[: held.gone] = held.pages[0]
                    own_W[held.gone : held.gone + len(held.pages)] = held.pages

    def take_over(self) -> None:
        """The step has succeeded: each row's next token continues from the new states."""
        for row, states in zip(self.rows, self.after, strict=False):
            row.sequence.states = states
        self.after = []


def sampling_rows(rows: Sequence[Row], vocab_size: int, device: torch.device) -> SamplingRows:
    requests = [row.owner.request for row in rows]
    tops = [min(request.topk_sample_logprobs, vocab_size) for request in requests]
    return SamplingRows.of([request.sampling for request in requests], vocab_size, device, tops)


def _adapter_order(sequence: SequenceProgress) -> tuple[str, int, int]:
    adapter = sequence.owner.adapter
    return (adapter.name if adapter else "", sequence.owner.number, sequence.sample)


def lora_rows(decoder: Decoder, counts: Sequence[tuple[RequestProgress, int]]) -> LoraRows | None:
    """A LoRA group for each (request, number of packed rows). None if no request has an adapter, unless rows must not
    share products with the base.

    Neighbours with one adapter do not share a group: the product of a group is computed over its rows together, and
    how it rounds depends on their number. A group of its own gives a request the same bits in any batch."""
    if decoder.isolation != "per-segment" and all(progress.adapter is None for progress, _ in counts):
        return None
    adapters = [progress.adapter.adapter if progress.adapter else None for progress, _ in counts]
    return LoraRows([0, *accumulate(rows for _, rows in counts)], adapters, [None] * len(adapters))


def decode(decoder: Decoder, cache: KVCache, plan: DecodePlan) -> Tensor:
    """Feed every sequence its newest token, and its draft. Returns logits_RV for what comes after each."""
    positions = [row.position for row in plan.rows]
    tokens_R = torch.tensor([row.token for row in plan.rows], device=cache.device)
    plan.turn_pages()
    recur = DecodeRecur([row.sequence.states for row in plan.rows])
    attend = DecodeAttend(cache, plan.table_GRW, positions, recur)
    chosen: list[Tensor] = []
    on_route = _recorder(chosen) if plan.routed else None
    hidden_RD = decoder(tokens_R, torch.tensor(positions, device=cache.device), attend, plan.lora, on_route)
    if chosen:
        pages = [row.pages[0].of(position) for row, position in zip(plan.rows, positions, strict=True)]
        cache.record_routes(pages, positions, chosen)
    plan.after = recur.after
    return decoder.logits(hidden_RD, plan.lora)


def _recorder(chosen: list[Tensor]) -> OnRoute:
    return lambda _, experts_TK: chosen.append(experts_TK)


def prefill(decoder: Decoder, cache: KVCache, batch: Sequence[RequestProgress]) -> list[Tensor]:
    """Compute positions computed:goal of the prompt of each request, packed without padding, in its first sequence's
    pages. Returns the logits_V after the last prompt token of each request whose prompt that completes, in order. The
    scores of prompts have yet to `land`."""
    pieces = [Piece(progress.sequences[0].pages, progress.computed, progress.goal) for progress in batch]
    spans = [range(piece.start, piece.stop) for piece in pieces]
    tokens = [progress.request.prompt[piece.start : piece.stop] for progress, piece in zip(batch, pieces, strict=True)]
    tokens_T = sent(torch.tensor([token for part in tokens for token in part]), cache.device)
    positions_T = sent(torch.tensor([position for span in spans for position in span]), cache.device)
    paged = attends_in_pages(cache)
    lora = lora_rows(decoder, _groups(batch, pieces, together=paged))
    chosen: list[Tensor] = []
    routed = any(progress.request.return_routed_experts for progress in batch)
    on_route = _recorder(chosen) if routed else None
    before = [progress.states.get(piece.start, {}) for progress, piece in zip(batch, pieces, strict=True)]
    recur = PrefillRecur(pieces, before, [progress.marks for progress in batch])
    attend = _attend(decoder, cache, pieces, recur)
    hidden_TD = decoder(tokens_T, positions_T, attend, lora, on_route)
    if chosen:
        pages = [piece.pages[0].of(at) for piece, span in zip(pieces, spans, strict=True) for at in span]
        cache.record_routes(pages, [position for span in spans for position in span], chosen)
    by_request = torch.split(hidden_TD, [len(span) for span in spans])
    for progress, hidden_ND, reached in zip(batch, by_request, recur.reached, strict=True):
        progress.states |= reached
        _score(decoder, progress, hidden_ND)
    complete = [
        (progress, hidden_ND[-1:]) for progress, hidden_ND in zip(batch, by_request, strict=True) if progress.at_end
    ]
    if not complete:
        return []
    hidden_RD = torch.cat([hidden_1D for _, hidden_1D in complete])
    return list(decoder.logits(hidden_RD, lora_rows(decoder, [(progress, 1) for progress, _ in complete])))


def attends_in_pages(cache: KVCache) -> bool:
    """True if one launch computes the attention of all prompts of a prefill. With latent attention, and on a CPU, it is
    done block by block."""
    return cache.device.type == "cuda" and not cache.latent


def _attend(decoder: Decoder, cache: KVCache, pieces: Sequence[Piece], recur: PrefillRecur) -> Attend:
    """The `Attend` of a prefill. On a CPU in float32 it is C; with latent attention, or without a compiler, torch block
    by block."""
    if attends_in_pages(cache):
        from workers.generator.gpu.prefill import PagedPrefill  # Triton: only a GPU needs it

        return PagedPrefill(cache, pieces, decoder.config.num_heads, recur)
    if native_kernel(cache) is not None and not cache.latent:
        return DecodeAttend.of_prompts(cache, pieces, recur)
    return PrefillAttend(cache, pieces, recur)


def _groups(
    batch: Sequence[RequestProgress], pieces: Sequence[Piece], *, together: bool
) -> list[tuple[RequestProgress, int]]:
    """The LoRA groups of a prefill, for `lora_rows`: one for each block. `together`: neighbouring blocks with one
    adapter are one group, where kernels multiply each row by itself: the fewer groups, the fuller are the blocks of an
    expert's rows."""
    pairs = zip(batch, pieces, strict=True)
    if not together:
        return [(progress, b - a) for progress, piece in pairs for a, b in piece.blocks()]
    alike = (list(own) for _, own in groupby(pairs, key=lambda pair: id(pair[0].adapter)))
    return [(own[0][0], sum(piece.stop - piece.start for _, piece in own)) for own in alike]


def _score(decoder: Decoder, progress: RequestProgress, hidden_ND: Tensor) -> None:
    """Compute what the request asks about the prompt positions that this piece predicts, in whole blocks."""
    first, last = progress.scores.first_row, min(progress.goal, len(progress.request.prompt) - 1)
    if first >= last:
        return
    first, most = first // BLOCK_TOKENS * BLOCK_TOKENS, SCORED_LOGITS if hidden_ND.is_cuda else MAX_LOGITS
    chunk = max(1, most // (decoder.config.vocab_size * BLOCK_TOKENS)) * BLOCK_TOKENS
    for start in range(max(first, progress.computed), last, chunk):
        rows = Piece((), start, min(start + chunk, last))
        hidden_RD = hidden_ND[rows.start - progress.computed : rows.stop - progress.computed]
        groups = _groups([progress], [rows], together=hidden_ND.is_cuda)
        logits_RV = decoder.logits(hidden_RD, lora_rows(decoder, groups))
        progress.scores.fill(start, logits_RV)
