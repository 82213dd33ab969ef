"""TorchEngine: continuous batching of our own decoder over a paged KV cache.

Each step first takes in the adapters that have been read meanwhile (`adapters`), then gives room to sequences that wait
for it, those set aside before all others (`seating`), then prefills queued requests in order (up to a budget of prompt
tokens, so that running sequences never wait long; longer prompts in pieces), then advances every running sequence by
one token. Sequences join and leave between steps. Prompts that begin as an earlier one did, with the same weights, take
up what it computed.

What a request gets depends on nothing but itself: its rows see only its pages, its adapter and its random numbers.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.generator import forward
from workers.generator.adapters import AdapterCache, AdapterUnusable
from workers.generator.decode_attend import native_kernel
from workers.generator.engine import EngineStats, Finished, GenerateRequest, RequestError
from workers.generator.kv_cache import KVCache
from workers.generator.pages import PAGE_TOKENS, pages_of
from workers.generator.prefill_queue import PrefillQueue
from workers.generator.prefix_cache import PrefixCache
from workers.generator.progress import RequestProgress, SequenceProgress, refused, request_fault
from workers.generator.prompt_scores import PromptScores
from workers.generator.sampling import Draw, SamplingRows, sample
from workers.generator.seating import Seating
from workers.generator.stop import DecodeText, NoTokenizer, StopRule
from workers.model.adapter import Adapter, load_adapter, version_of
from workers.model.decoder import Decoder

log = logging.getLogger(__name__)

DEFAULT_PREFILL_TOKENS = 2048
DEFAULT_ADAPTER_BYTES = 2 << 30
DEFAULT_PREFIX_BYTES = 512 << 20

#: How long a step waits for an adapter when all that is here does: what work that arrives waits at most.
READ_WAIT_S = 0.005


class TorchEngine:
    """An `Engine`. Not thread-safe: one thread drives it."""

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
        decode_text: DecodeText | None = None,
    ) -> None:
        """`slots` sequences at a time, each of at most `context` tokens, all together of `kv_tokens` (enough for
        `slots` of full length when None; never less than one of full length needs). `prefill_tokens` caps the prompt
        tokens of a step; a longer prompt takes several. `adapter_bytes` and `prefix_bytes` are for adapters and for
        keys and values of prompts, kept after use; with `prefix_bytes` 0 none are."""
        config = decoder.config
        self._decoder = decoder
        self._eos_token_ids = eos_token_ids
        self._decode_text = decode_text
        self._adapters = AdapterCache(self._load, adapter_bytes)
        weight = next(decoder.parameters())
        self._context = context
        each = pages_of(context)
        pages = slots * (each + 1) if kv_tokens is None else max(each, kv_tokens // PAGE_TOKENS)
        self._cache = KVCache(
            layers=config.num_layers,
            pages=pages,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            mixture_layers=len(config.mixture_layers),
            choices=config.experts_per_token,
            dtype=weight.dtype,
            device=weight.device,
        )
        native_kernel(self._cache)  # compiled now rather than in somebody's first step
        self._decode_plan = forward.decoding(decoder, self._cache, slots=slots, context=context)
        self._seating = Seating(self._cache, slots)
        self._prefix = PrefixCache(self._cache, prefix_bytes)
        self._queue = PrefillQueue(self._prefix, prefill_tokens)
        self._here: dict[str, RequestProgress] = {}  # all that have not ended
        self._numbers = itertools.count()
        self._running: dict[str, RequestProgress] = {}  # prefilled, not done
        self._finished: list[Finished] = []
        self._starting: dict[str, RequestProgress] = {}  # of these, those with a sequence that has no token yet
        self._plan: forward.DecodePlan | None = None  # of all running sequences, while they stay the same
        self._planned = 0  # what `seating.changes` was then
        counted = ("decode_steps", "slots_busy", "slots_offered", "prefill_tokens", "cache_hit_tokens", "sampled")
        self._counts = dict.fromkeys(counted, 0)

    # -- the contract

    @property
    def free_slots(self) -> int:
        """By rows and by KV space: what waits is counted as what it needs to start, what might come as what those here
        take."""
        seating, waiting = self._seating, self._waiting()
        if seating.aside:
            return 0
        needed = sum(pages_of(len(progress.request.prompt)) * progress.unstarted for progress in self._queue)
        space = (seating.pool.free - needed - seating.seated) // seating.pages_each
        return max(0, min(seating.free_rows - waiting, space))

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running or self._finished or self._adapters.reading)

    def add(self, request: GenerateRequest) -> None:
        fault = request_fault(request, self._context, self._decoder.config.vocab_size)
        if request.id in self._here:
            fault = f"request {request.id} is here already"
        if fault is not None:
            self._finished.append(refused(request.id, fault))
            return
        try:
            self._here[request.id] = self._progress(request)
            self._queue.add(self._here[request.id])
        except NoTokenizer as error:
            self._finished.append(refused(request.id, str(error)))
        except Exception as error:
            log.exception("request %s: cannot be prepared", request.id)
            self._finished.append(_broken(request.id, error))

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        self._install()
        self._seating.bring_back()
        self._survive(list(self._starting.values()), self._start_sequences)
        self._survive(self._queue.choose(self._seating.seat), self._prefill)
        self._survive(list(self._starting.values()), self._start_sequences)
        self._seating.grow()
        self._survive(list(self._running.values()), self._decode)
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, request_id: str) -> Finished | None:
        progress = self._here.get(request_id)
        if progress is None:
            return None
        for sequence in progress.sequences[: progress.started]:
            if sequence.stop_reason is None:
                self._note_routes(sequence)
        result = progress.finished()
        self._forget(progress)
        return result

    def swap_adapter(self, name: str, folder: Path) -> None:
        self._adapters.swap(name, folder)

    def run_moved(self, run: str, version: int) -> None:
        for progress in [p for p in self._here.values() if p.request.run == run]:
            progress.run_version = version
            self._stop_stale(progress)

    def close(self) -> None:
        self._adapters.close()

    def stats(self) -> EngineStats:
        return EngineStats(
            decode_steps=self._counts["decode_steps"],
            slots_busy=self._counts["slots_busy"],
            slots_offered=self._counts["slots_offered"],
            prefill_tokens=self._counts["prefill_tokens"],
            cache_hit_tokens=self._counts["cache_hit_tokens"],
            sampled_tokens=self._counts["sampled"],
            running=self._seating.seated,
            waiting=self._waiting(),
            adapters_loaded=len(self._adapters),
            adapter_bytes=self._adapters.size_bytes,
            kv_tokens=self._cache.pages * PAGE_TOKENS,
            kv_tokens_used=(self._cache.pages - self._seating.pool.free) * PAGE_TOKENS,
            preempted=self._seating.preempted,
        )

    # -- adapters

    def _load(self, folder: Path) -> tuple[Adapter, int]:
        loaded = load_adapter(folder, self._decoder.config, device=self._cache.device)
        return loaded.adapter, version_of(loaded.details)

    def _install(self) -> None:
        """Take in the adapters that have been read; while there is nothing else to do, wait a moment for one."""
        if not (self._running or self._finished or self._queue.ready):
            self._adapters.wait(READ_WAIT_S)
        while (installed := self._adapters.install()) is not None:
            held, error = installed
            self._plan = None
            for progress in [p for p in self._here.values() if p.adapter is held and 0 < p.awaits <= held.ended]:
                progress.awaits = 0
                if error is None:
                    self._stop_stale(progress)
                else:
                    self._forget(progress)
                    self._finished.append(_unread(progress.request.id, error))

    def _stop_stale(self, progress: RequestProgress) -> None:
        """End the sequences that are too old. Those whose prompt is not computed need not be, if newer weights are on
        their way: they wait for them."""
        stale, adapter = [] if progress.awaits else progress.too_old(), progress.adapter
        if stale and progress.prompt_version is None and adapter is not None and adapter.coming:
            progress.awaits = adapter.asked
            return
        for sequence in stale:
            sequence.stop_reason, sequence.stale = "length", True
            self._note_routes(sequence)
            self._seating.leave(sequence)
            progress.given_up = True
        if stale and progress.done:
            self._end(progress)

    # -- coming and going

    def _waiting(self) -> int:
        queued = sum(progress.unstarted for progress in self._queue)
        return queued + sum(progress.unstarted for progress in self._running.values())

    def _progress(self, request: GenerateRequest) -> RequestProgress:
        limit = self._context - len(request.prompt) + 1
        if request.sampling.max_tokens is not None:
            limit = min(limit, request.sampling.max_tokens)
        rule = StopRule(request.sampling, self._eos_token_ids, limit, self._decode_text)
        scores = PromptScores(request, self._decoder.config.vocab_size)
        adapter = self._adapters.acquire(request.adapter, request.adapter_folder) if request.adapter else None
        return RequestProgress(request, rule, adapter, scores, next(self._numbers))

    def _end(self, progress: RequestProgress) -> None:
        self._finished.append(progress.finished())
        self._forget(progress)

    def _forget(self, progress: RequestProgress) -> None:
        """Let go of everything a request holds."""
        del self._here[progress.request.id]
        self._starting.pop(progress.request.id, None)
        if self._running.pop(progress.request.id, None) is None:
            self._queue.discard(progress)
        for sequence in progress.sequences[: progress.started]:
            self._seating.leave(sequence)
        if progress.adapter is not None:
            self._adapters.release(progress.adapter)

    def _fail(self, progress: RequestProgress, error: Exception) -> None:
        """End a request that went wrong. What it computed may not be finite."""
        log.warning("request %s failed: %s", progress.request.id, error, exc_info=error)
        for sequence in progress.running():
            self._seating.clear(sequence)
        self._forget(progress)
        self._finished.append(_broken(progress.request.id, error))

    def _survive(self, batch: list[RequestProgress], work: Callable[[list[RequestProgress]], None]) -> None:
        """Do `work` for the batch; if it raises, for each request alone, so that only a culprit fails."""
        if not batch:
            return
        try:
            work(batch)
        except Exception as error:
            self._plan = None
            if len(batch) == 1:
                self._fail(batch[0], error)
                return
            log.warning("a step of %d requests failed (%s); trying each alone", len(batch), error)
            for progress in batch:
                self._survive([progress], work)

    # -- prefill

    def _prefill(self, batch: list[RequestProgress]) -> None:
        batch = sorted(batch, key=lambda progress: progress.request.adapter)
        complete = [progress for progress in batch if progress.at_end]
        logits = forward.prefill(self._decoder, self._cache, batch)
        drawn = self._draw([progress.sequences[0] for progress in complete], torch.stack(logits)) if complete else []
        for progress in batch:
            if progress.computed == progress.cache_hit:
                self._counts["cache_hit_tokens"] += progress.cache_hit
            self._counts["prefill_tokens"] += progress.goal - progress.computed
            progress.computed = progress.goal
            self._queue.save(progress)
        for progress, logits_V in zip(complete, logits, strict=True):
            progress.prompt_logits_V, progress.prompt_version = logits_V.clone(), progress.version
            self._queue.discard(progress)
            self._running[progress.request.id] = progress
            if progress.unstarted:
                self._starting[progress.request.id] = progress
            self._plan = None
        self._accept([progress.sequences[0] for progress in complete], drawn, [p.version for p in complete])

    def _start_sequences(self, batch: list[RequestProgress]) -> None:
        """Start more sequences of prefilled requests: those which took another's place (`_retire`), and as many others
        as there is room for, from the prompt that one of theirs still holds."""
        for progress in batch:
            while begun := self._begun(progress):
                logits_RV = progress.prompt_logits_V.expand(len(begun), -1)
                self._accept(begun, self._draw(begun, logits_RV), [progress.prompt_version or 0] * len(begun))
            if not progress.unstarted:
                self._starting.pop(progress.request.id, None)

    def _begun(self, progress: RequestProgress) -> list[SequenceProgress]:
        """The sequences of a request that have the prompt and no token yet."""
        source = next(progress.running(), None)
        while source is not None and progress.unstarted:
            if not self._seating.seat_beside(progress.sequences[progress.started], source):
                break
            progress.started += 1
        return [sequence for sequence in progress.running() if not sequence.tokens]

    # -- decode

    def _decode(self, batch: list[RequestProgress]) -> None:
        everyone = len(batch) == len(self._running)
        plan = self._plan if everyone and self._planned == self._seating.changes else None
        if plan is None:
            sequences = [sequence for progress in batch for sequence in progress.running()]
            device = self._cache.device
            if not sequences:
                return
            plan = forward.DecodePlan(sequences, self._decoder, context=self._context, device=device)
        if everyone:
            self._plan, self._planned = plan, self._seating.changes
        logits_RV = self._decode_plan(plan)
        drawn = self._draw(plan.rows, logits_RV, plan.sampling)
        self._counts["decode_steps"] += 1
        self._counts["slots_busy"] += len(plan.rows)
        self._counts["slots_offered"] += self._seating.rows
        self._accept(plan.rows, drawn, plan.versions)

    def _draw(
        self, sequences: Sequence[SequenceProgress], logits_RV: Tensor, rows: SamplingRows | None = None
    ) -> list[Draw]:
        if rows is None:
            rows = forward.sampling_rows(sequences, logits_RV.shape[-1], logits_RV.device)
        return sample(logits_RV, rows, [sequence.uniform for sequence in sequences])

    def _accept(self, sequences: Sequence[SequenceProgress], draws: list[Draw], versions: list[int]) -> None:
        for sequence, drawn, version in zip(list(sequences), draws, versions, strict=True):
            progress = sequence.owner
            if progress.request.id not in self._running:
                continue  # another of its sequences failed it, in this very loop
            if not math.isfinite(drawn.logprob):
                self._fail(progress, NotFinite(adapted=progress.adapter is not None))
                continue
            try:
                sequence.accept(drawn, version)
            except Exception as error:
                self._fail(progress, error)
                continue
            self._counts["sampled"] += 1
            if sequence.stop_reason:
                self._retire(sequence)

    def _retire(self, sequence: SequenceProgress) -> None:
        """A sequence has ended. Its place goes to a sibling that waits, as the prompt is in it already, or is freed."""
        progress = sequence.owner
        self._note_routes(sequence)
        if progress.unstarted:
            self._seating.hand_over(sequence, progress.sequences[progress.started])
            progress.started += 1
            return
        self._seating.leave(sequence)
        if progress.done:
            self._end(progress)

    def _note_routes(self, sequence: SequenceProgress) -> None:
        """Keep, if asked, where the tokens of a sequence went, before its pages are another's."""
        if sequence.owner.request.return_routed_experts and sequence.tokens:
            sequence.routes = self._seating.routes(sequence)


class NotFinite(ArithmeticError):
    """A sequence's logits are NaN or infinite."""

    def __init__(self, *, adapted: bool) -> None:
        super().__init__("the logits are not finite" + ("; are this sampler's weights?" if adapted else ""))
        self.adapted = adapted


def _unread(request_id: str, error: BaseException) -> Finished:
    """The end of a request whose adapter could not be read."""
    if isinstance(error, AdapterUnusable):
        return refused(request_id, str(error))
    log.error("request %s: its adapter cannot be read", request_id, exc_info=error)
    return _broken(request_id, error)


def _broken(request_id: str, error: BaseException) -> Finished:
    """The end of a request that broke. Only what we word ourselves goes to the user: the rest may name files."""
    if isinstance(error, NotFinite):
        return Finished(request_id, error=RequestError(str(error), "user" if error.adapted else "server"))
    message = f"generation failed ({type(error).__name__}); the generator's log has the details"
    return Finished(request_id, error=RequestError(message, "server"))
