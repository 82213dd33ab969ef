"""TorchEngine: continuous batching of our own decoder over a paged KV cache.

Each step first installs the adapters that have been read meanwhile (`adapters`), then seats waiting sequences
(`seating`), then prefills queued requests in order (up to a budget of prompt tokens, so that running sequences never
wait long; longer prompts in pieces), then advances every running sequence by one token, or by more where drafts come
true (`drafts`).
Sequences join and leave between steps. Prompts that begin as an earlier one did, with the same weights, reuse its keys
and values.

A request's result depends on the request alone: its rows see only its pages, its adapter and its random numbers.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from store.blobs.contract import Weights
from workers.generator import forward
from workers.generator.adapters import AdapterCache
from workers.generator.attention.decode_attend import native_kernel
from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache, pages_of
from workers.generator.cache.page_groups import page_groups
from workers.generator.cache.prefix_cache import PrefixCache
from workers.generator.decoding import Decoding, draw
from workers.generator.engine import EngineStats, Finished, GenerateRequest, SoFar
from workers.generator.requests.admission import Admission
from workers.generator.requests.open_requests import OpenRequests
from workers.generator.requests.prefill_queue import PrefillQueue
from workers.generator.requests.progress import RequestProgress, Row
from workers.generator.requests.refusals import NotFinite, failed, refused, request_fault
from workers.generator.requests.seating import Seating, Unmoved
from workers.generator.tokens.drafts import Drafts, drop
from workers.generator.tokens.prompt_scores import PromptScores, land
from workers.generator.tokens.sampling import Draw
from workers.generator.tokens.stop import DecodeText, StopRule
from workers.model.adapters.adapter import Adapter, adapter_bytes, load_adapter, version_of
from workers.model.decoder import Decoder

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

DEFAULT_PREFILL_TOKENS = 2048
DEFAULT_ADAPTER_BYTES = 2 << 30
DEFAULT_PREFIX_BYTES = 512 << 20

#: How long a step waits for an adapter when all requests do; new work waits at most this long for it.
READ_WAIT_S = 0.005

#: The totals of `EngineStats` that grow step by step.
_COUNTED = (
    *("decode_steps", "slots_busy", "slots_offered", "prefill_tokens", "cache_hit_tokens", "sampled_tokens"),
    *("drafted_tokens", "accepted_tokens"),
)


class TorchEngine:
    """The `Engine` in PyTorch. Not thread-safe: a single thread may call it."""

    def __init__(
        self,
        decoder: Decoder,
        eos_token_ids: tuple[int, ...],
        *,
        slots: int,
        context: int,
        kv_tokens: int | None = None,
        prefill_tokens: int = DEFAULT_PREFILL_TOKENS,
        adapter_bytes: int = DEFAULT_ADAPTER_BYTES,
        prefix_bytes: int = DEFAULT_PREFIX_BYTES,
        packed: bool = True,
        lookup: int = 0,
        decode_text: DecodeText | None = None,
    ) -> None:
        """`slots` sequences at a time, each of at most `context` tokens, all together of `kv_tokens` (enough for
        `slots` of full length when None; never less than one of full length needs). `prefill_tokens` caps the prompt
        tokens of a step; a longer prompt takes several. `adapter_bytes` limits the adapters in use or kept after it
        (`requests/admission.py`), `prefix_bytes` the prompts' keys and values that are kept; with 0 no prompts are.
        `packed`: see `Decoder.pack`. A step tries up to `lookup` tokens more of a sequence; none of models with
        recurrent layers."""
        config = decoder.config
        self._decoder = decoder
        if packed:
            decoder.pack()
        self._eos_token_ids = eos_token_ids
        self._decode_text = decode_text
        self._adapters = AdapterCache(self._load, self._size, adapter_bytes)
        self._admission = Admission(self._adapters)
        weight = next(decoder.parameters())
        self._context = context
        each, groups = pages_of(context), page_groups(config, context)
        pages = len(groups) * (slots * (each + 1) if kv_tokens is None else max(each, kv_tokens // PAGE_TOKENS))
        self._cache = KVCache(
            layers=config.num_layers,
            pages=pages,
            kv_heads=config.num_kv_heads if config.latent is None else 1,
            head_dim=config.head_dim if config.latent is None else config.latent.kept,
            values_within=0 if config.latent is None else config.latent.kv_rank,
            mixture_layers=len(config.mixture_layers),
            choices=config.experts_per_token,
            groups=[group.layers for group in groups],
            dtype=weight.dtype,
            device=weight.device,
        )
        native_kernel(self._cache)  # compiled now rather than in the first step
        self._seating = Seating(self._cache, slots, groups, max(prefill_tokens, PAGE_TOKENS))
        self._drafts = Drafts(lookup if config.recurrence is None else 0, self._seating)
        self._decoding = Decoding(decoder, self._cache, self._seating, slots=slots, context=context, lookup=lookup)
        self._prefix = PrefixCache(self._cache, prefix_bytes, config.state_bytes)
        self._queue = PrefillQueue(self._prefix, prefill_tokens)
        self._open = OpenRequests(self._queue, self._seating, self._adapters)
        self._numbers = itertools.count()
        self._counts = dict.fromkeys(_COUNTED, 0)

    # -- the contract

    @property
    def free_slots(self) -> int:
        """By rows and by KV pages: waiting sequences are counted with the pages they need to start, new ones with the
        average of the seated ones. Those that wait for others' adapters to go hold up nobody: as many as there are rows
        are not counted."""
        seating, waiting = self._seating, self._open.waiting
        if seating.aside:
            return 0
        held_up = sum(progress.unstarted for progress in self._queue if progress.held_up and self._admission.short)
        needed = sum(
            seating.pages_for(len(progress.request.prompt)) * progress.unstarted
            for progress in self._queue
            if not (progress.held_up and self._admission.short)
        )
        space = (seating.pool.free - needed - seating.pages_to_grow) // seating.pages_each
        return max(0, min(seating.free_rows - waiting + min(held_up, seating.rows), space))

    @property
    def yields(self) -> int:
        return self._seating.yields_beside({progress.request.tenant for progress in self._queue})

    @property
    def busy(self) -> bool:
        return bool(self._open.here or self._open.finished or self._adapters.reading)

    def add(self, request: GenerateRequest) -> None:
        fault = request_fault(request, self._context, self._decoder.config.vocab_size)
        if request.id in self._open.here:
            fault = f"request {request.id} is here already"
        if fault is not None:
            self._open.finished.append(refused(request.id, fault))
            return
        try:
            self._open.enter(self._progress(request))
            self._admit()
        except Exception as error:
            if (entered := self._open.here.get(request.id)) is not None:
                self._open.fail(entered, error)
            else:
                self._open.finished.append(failed(request.id, error))

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        requests = self._open
        self._install()
        self._move(self._seating.bring_back)
        self._survive(list(requests.starting.values()), self._start_sequences)
        self._survive(self._move(lambda: self._queue.choose(self._seating)), self._prefill)
        self._survive(list(requests.running.values()), self._land)
        self._survive(list(requests.starting.values()), self._start_sequences)
        self._move(self._seating.grow)
        self._survive(list(requests.running.values()), self._decode)
        finished, requests.finished = requests.finished, []
        return finished

    def cancel(self, request_id: str) -> Finished | None:
        return self._open.cancel(request_id)

    def so_far(self, request_id: str) -> list[SoFar]:
        progress = self._open.here.get(request_id)
        return [sequence.so_far for sequence in progress.sequences] if progress is not None else []

    def swap_adapter(self, name: str, folder: Weights) -> None:
        self._adapters.swap(name, folder)
        self._admit()

    def run_moved(self, run: str, version: int) -> None:
        for progress in [p for p in self._open.here.values() if p.request.run == run]:
            progress.run_version = version
            self._open.stop_stale(progress)

    def close(self) -> None:
        self._adapters.close()

    def stats(self) -> EngineStats:
        return EngineStats(
            **self._counts,
            running=self._seating.seated,
            waiting=self._open.waiting,
            adapters_loaded=len(self._adapters),
            adapter_bytes=self._adapters.size_bytes,
            kv_tokens=self._cache.pages * PAGE_TOKENS // self._cache.groups,
            kv_tokens_used=(self._cache.pages - self._seating.pool.free) * PAGE_TOKENS // self._cache.groups,
            preempted=self._seating.preempted,
        )

    # -- requests and their adapters

    def _load(self, folder: Path) -> tuple[Adapter, int]:
        loaded = load_adapter(folder, self._decoder.config, device=self._cache.device)
        return loaded.adapter, version_of(loaded.details)

    def _size(self, folder: Path) -> int:
        return adapter_bytes(folder, self._decoder.config)

    def _install(self) -> None:
        """Install the adapters that have been read; if there is nothing else to do, wait a moment for one."""
        self._admit()
        if self._open.stuck:
            self._adapters.wait(READ_WAIT_S)
        while (installed := self._adapters.install()) is not None:
            self._decoding.replan()
            self._open.adapter_read(*installed)
            self._admit()

    def _admit(self) -> None:
        if not self._decoding.unchanged:
            self._decoding.replan()
            if not self._open.running:
                self._decoding.drop()
        self._admission.decide(self._open.here.values())

    def _progress(self, request: GenerateRequest) -> RequestProgress:
        limit = request.most_tokens(self._context)
        rule = StopRule(request.sampling, self._eos_token_ids, limit, self._decode_text, request.prompt)
        scores = PromptScores(request, self._decoder.config.vocab_size)
        adapter = self._adapters.acquire(request.adapter, request.adapter_folder) if request.adapter else None
        return RequestProgress(request, rule, adapter, scores, next(self._numbers))

    def _survive(self, batch: list[RequestProgress], work: Callable[[list[RequestProgress]], None]) -> None:
        """Do `work` for the batch; if it raises, for each request alone, so that only the faulty one fails."""
        if not batch:
            return
        try:
            work(batch)
        except Exception as error:
            self._decoding.replan()
            self._decoding.drop()
            if len(batch) == 1:
                self._open.fail(batch[0], error)
                return
            log.warning("a step of %d requests failed (%s); trying each alone", len(batch), error)
            for progress in batch:
                self._survive([progress], work)

    def _move(self, work: Callable[[], ResultT]) -> ResultT:
        """Do `work`, which may set sequences aside or bring them back. A sequence whose pages cannot be copied fails
        alone."""
        while True:
            try:
                return work()
            except Unmoved as error:
                self._open.fail(error.sequence.owner, error.why)

    # -- prefill

    def _prefill(self, batch: list[RequestProgress]) -> None:
        batch = sorted(batch, key=lambda progress: progress.request.adapter)
        complete = [progress for progress in batch if progress.at_end]
        drawing = [progress for progress in complete if progress.rule.limit]
        logits = forward.prefill(self._decoder, self._cache, batch)
        rows = [logits_V.clone() for progress, logits_V in zip(complete, logits, strict=True) if progress.rule.limit]
        firsts = [Row(progress.sequences[0]) for progress in drawing]
        drawn = draw(firsts, torch.stack(rows)) if drawing else []
        land(progress.scores for progress in batch)
        for progress in batch:
            if progress.computed == progress.cache_hit:
                self._counts["cache_hit_tokens"] += progress.cache_hit
            self._counts["prefill_tokens"] += progress.goal - progress.computed
            progress.computed = progress.goal
            self._queue.save(progress)
            self._seating.advance(progress.sequences[0])
        for progress in complete:
            if not progress.rule.limit:
                self._open.score_only(progress)
        for progress, logits_V in zip(drawing, rows, strict=True):
            progress.prompt_logits_V, progress.prompt_version = logits_V, progress.version
            self._open.run(progress)
            self._decoding.replan()
        self._accept(firsts, drawn, [progress.version for progress in drawing])

    def _start_sequences(self, batch: list[RequestProgress]) -> None:
        """Start more sequences of prefilled requests: those that took over an ended sibling's pages
        (`OpenRequests.retire`), and as many others as there is room for, with the prompt of a running sibling."""
        for progress in batch:
            while begun := self._begun(progress):
                logits_RV = progress.prompt_logits_V.expand(len(begun), -1)
                self._accept(begun, draw(begun, logits_RV), [progress.prompt_version or 0] * len(begun))
            if not progress.unstarted:
                self._open.starting.pop(progress.request.id, None)

    def _begun(self, progress: RequestProgress) -> list[Row]:
        """The sequences of a request that have the prompt but no token yet."""
        source = next(progress.running(), None)
        while source is not None and progress.unstarted:
            beside = partial(self._seating.seat_beside, progress.sequences[progress.started], source)
            if not self._move(beside):
                break
            progress.started += 1
        return [Row(sequence) for sequence in progress.running() if not sequence.tokens]

    # -- decode

    def _decode(self, batch: list[RequestProgress]) -> None:
        everyone = len(batch) == len(self._open.running)
        sequences = [sequence for progress in batch for sequence in progress.running()]
        if not sequences:
            return
        if everyone:
            self._drafts.make(sequences)
        else:
            drop(sequences)
        plan, drawn = self._decoding.step(sequences, everyone)
        if any(plan.drafted) and not all(math.isfinite(draw.logprob) for draw in drawn):
            # Rows before a draft may have multiplied its nan by zero: they are computed without it.
            for sequence in sequences:
                self._seating.clear_after(sequence)
            drop(sequences)
            plan, drawn = self._decoding.step(sequences, everyone)
        plan.take_over()
        self._count_step(len(plan.sequences))
        self._accept(plan.rows, drawn, plan.versions)
        self._counts["drafted_tokens"] += sum(plan.drafted)
        self._counts["accepted_tokens"] += sum(len(sequence.draft) for sequence in plan.sequences)

    def _count_step(self, sequences: int) -> None:
        self._counts["decode_steps"] += 1
        self._counts["slots_busy"] += sequences
        self._counts["slots_offered"] += self._seating.rows

    def _land(self, _: list[RequestProgress]) -> None:
        """Before the running set, or its adapters, change: take the draws of the step under way (`gpu/ahead.py`), for
        the sequences that are still there."""
        flight = self._decoding.landed()
        if flight is None:
            return
        draws, plan = flight.draws(), flight.plan
        kept = [at for at in range(len(plan.rows)) if flight.fits(at)]
        self._count_step(len(kept))
        self._accept([plan.rows[at] for at in kept], [draws[at] for at in kept], [plan.versions[at] for at in kept])

    def _accept(self, rows: Sequence[Row], draws: list[Draw], versions: list[int]) -> None:
        """Take what was drawn; for a sequence with a draft, up to the first token that differs from it."""
        for (sequence, ahead), drawn, version in zip(list(rows), draws, versions, strict=True):
            progress = sequence.owner
            if progress.request.id not in self._open.running:
                continue  # another of the request's sequences has failed it in this loop
            if ahead > len(sequence.draft):
                continue  # it follows a drafted token that was not drawn
            if not math.isfinite(drawn.logprob):
                self._open.fail(progress, NotFinite(adapted=progress.adapter is not None))
                continue
            try:
                sequence.accept(drawn, version)
            except Exception as error:
                self._open.fail(progress, error)
                continue
            self._counts["sampled_tokens"] += 1
            if sequence.stop_reason or sequence.draft[ahead : ahead + 1] != [drawn.token]:
                del sequence.draft[ahead:]
            if sequence.stop_reason:
                self._open.retire(sequence)
