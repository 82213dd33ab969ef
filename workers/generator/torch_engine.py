"""TorchEngine: continuous batching of our own decoder over a static KV cache.

Each step first gives free slots to sequences that wait for one, then prefills queued requests in order (up to a
budget of prompt tokens, so that running sequences never wait long; longer prompts in pieces), then advances every
running sequence by one token. Sequences join and leave between steps. Prompts that begin as an earlier one did, with
the same weights, take up what it computed.

What a request gets depends on nothing but itself: its rows see only its slots, its adapter and its random numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.generator import forward
from workers.generator.adapters import AdapterCache, AdapterUnusable
from workers.generator.engine import EngineStats, Finished, GenerateRequest, RequestError
from workers.generator.kv_cache import KVCache
from workers.generator.prefill_queue import PrefillQueue
from workers.generator.prefix_cache import PrefixCache
from workers.generator.progress import RequestProgress, SequenceProgress, refused, request_fault
from workers.generator.prompt_scores import PromptScores
from workers.generator.sampling import Draw, SamplingRows, sample
from workers.generator.stop import DecodeText, NoTokenizer, StopRule
from workers.model.adapter import Adapter, load_adapter
from workers.model.adapter_pool import AdapterPool
from workers.model.decoder import Decoder

log = logging.getLogger(__name__)

DEFAULT_PREFILL_TOKENS = 2048
DEFAULT_ADAPTER_BYTES = 2 << 30
DEFAULT_PREFIX_BYTES = 512 << 20


class TorchEngine:
    """An `Engine`. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        decoder: Decoder,
        eos_token_ids: tuple[int, ...],
        *,
        slots: int,
        context: int,
        prefill_tokens: int = DEFAULT_PREFILL_TOKENS,
        adapter_bytes: int = DEFAULT_ADAPTER_BYTES,
        prefix_bytes: int = DEFAULT_PREFIX_BYTES,
        decode_text: DecodeText | None = None,
    ) -> None:
        """`slots` sequences at a time, each of at most `context` tokens. `prefill_tokens` caps the prompt tokens of a
        step; a longer prompt takes several. `adapter_bytes` and `prefix_bytes` are for adapters and for keys and values
        of prompts, kept after use; with `prefix_bytes` 0 none are."""
        config = decoder.config
        self._decoder = decoder
        self._eos_token_ids = eos_token_ids
        self._decode_text = decode_text
        self._pool = AdapterPool()
        self._adapters = AdapterCache(self._load, adapter_bytes)
        weight = next(decoder.parameters())
        self._cache = KVCache(
            layers=config.num_layers,
            slots=slots,
            kv_heads=config.num_kv_heads,
            context=context,
            head_dim=config.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._free = list(reversed(range(slots)))
        self._prefix = PrefixCache(self._cache, prefix_bytes)
        self._queue = PrefillQueue(self._prefix, prefill_tokens)
        self._running: dict[str, RequestProgress] = {}  # prefilled, not done
        self._finished: list[Finished] = []
        self._plan: forward.DecodePlan | None = None  # of all running sequences, while they stay the same
        counted = ("decode_steps", "slots_busy", "slots_offered", "prefill_tokens", "cache_hit_tokens", "sampled")
        self._counts = dict.fromkeys(counted, 0)

    # -- the contract

    @property
    def free_slots(self) -> int:
        return max(0, len(self._free) - self._waiting())

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running or self._finished)

    def add(self, request: GenerateRequest) -> None:
        fault = request_fault(request, self._cache.context, self._decoder.config.vocab_size)
        if self._find(request.id) is not None:
            fault = f"request {request.id} is here already"
        if fault is not None:
            self._finished.append(refused(request.id, fault))
            return
        try:
            self._queue.add(self._progress(request))
        except (AdapterUnusable, NoTokenizer) as error:
            self._finished.append(refused(request.id, str(error)))
        except Exception as error:
            log.exception("request %s: cannot be prepared", request.id)
            self._finished.append(_broken(request.id, error))

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        self._survive(list(self._running.values()), self._start_sequences)
        self._survive(self._queue.choose(self._take_slot), self._prefill)
        self._survive(list(self._running.values()), self._start_sequences)
        self._survive(list(self._running.values()), self._decode)
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, request_id: str) -> Finished | None:
        progress = self._find(request_id)
        if progress is None:
            return None
        result = progress.finished()
        self._forget(progress)
        return result

    def swap_adapter(self, name: str, folder: Path) -> None:
        self._adapters.swap(name, folder)
        self._plan = None

    def stats(self) -> EngineStats:
        return EngineStats(
            decode_steps=self._counts["decode_steps"],
            slots_busy=self._counts["slots_busy"],
            slots_offered=self._counts["slots_offered"],
            prefill_tokens=self._counts["prefill_tokens"],
            cache_hit_tokens=self._counts["cache_hit_tokens"],
            sampled_tokens=self._counts["sampled"],
            running=self._cache.slots - len(self._free),
            waiting=self._waiting(),
            adapters_loaded=len(self._adapters),
            adapter_bytes=self._adapters.size_bytes,
        )

    # -- coming and going

    def _load(self, folder: Path) -> Adapter:
        """Read an adapter into the pool, from where one product reads those of many rows."""
        return self._pool.seat(load_adapter(folder, self._decoder.config, device=self._cache.device).adapter)

    def _waiting(self) -> int:
        queued = sum(progress.unstarted for progress in self._queue)
        return queued + sum(progress.unstarted for progress in self._running.values())

    def _find(self, request_id: str) -> RequestProgress | None:
        queued = (progress for progress in self._queue if progress.request.id == request_id)
        return self._running.get(request_id) or next(queued, None)

    def _progress(self, request: GenerateRequest) -> RequestProgress:
        limit = self._cache.context - len(request.prompt) + 1
        if request.sampling.max_tokens is not None:
            limit = min(limit, request.sampling.max_tokens)
        rule = StopRule(request.sampling, self._eos_token_ids, limit, self._decode_text)
        adapter = self._adapters.acquire(request.adapter, request.adapter_folder) if request.adapter else None
        return RequestProgress(request, rule, adapter, PromptScores(request, self._decoder.config.vocab_size))

    def _forget(self, progress: RequestProgress) -> None:
        """Let go of everything a request holds."""
        if self._running.pop(progress.request.id, None) is None:
            self._queue.discard(progress)
        for sequence in list(progress.running()):
            self._free_slot(sequence)
        if progress.adapter is not None:
            self._adapters.release(progress.adapter)

    def _free_slot(self, sequence: SequenceProgress) -> None:
        self._free.append(sequence.slot)
        sequence.slot = -1
        self._plan = None

    def _fail(self, progress: RequestProgress, error: Exception) -> None:
        """End a request that went wrong. Its slots may hold values that are not finite, which no mask would hide."""
        log.warning("request %s failed: %s", progress.request.id, error, exc_info=error)
        for sequence in progress.running():
            self._cache.clear(sequence.slot)
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

    def _take_slot(self) -> int | None:
        return self._free.pop() if self._free else None

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
            progress.prompt_logits_V = logits_V.clone()
            self._queue.discard(progress)
            self._running[progress.request.id] = progress
            self._plan = None
        self._accept([progress.sequences[0] for progress in complete], drawn)

    def _start_sequences(self, batch: list[RequestProgress]) -> None:
        """Start more sequences of prefilled requests: those which were handed a slot (`_retire`), and as many others
        as there are free slots, from the prompt that a running one still holds."""
        for progress in batch:
            while begun := self._seated(progress):
                logits_RV = progress.prompt_logits_V.expand(len(begun), -1)
                self._accept(begun, self._draw(begun, logits_RV))

    def _seated(self, progress: RequestProgress) -> list[SequenceProgress]:
        """The sequences of a request whose slots hold the prompt and that have no token yet."""
        while progress.unstarted and self._free:
            source = next(progress.running()).slot
            sequence = progress.start_next(self._free.pop())
            self._cache.copy_prefix(source, sequence.slot, len(progress.request.prompt))
        return [sequence for sequence in progress.running() if not sequence.tokens]

    # -- decode

    def _decode(self, batch: list[RequestProgress]) -> None:
        everyone = len(batch) == len(self._running)
        plan = self._plan if everyone else None
        if plan is None:
            sequences = [sequence for progress in batch for sequence in progress.running()]
            plan = forward.DecodePlan(sequences, self._decoder.config.vocab_size, self._cache.device)
        if everyone:
            self._plan = plan
        logits_RV = forward.decode(self._decoder, self._cache, plan)
        drawn = self._draw(plan.rows, logits_RV, plan.sampling)
        self._counts["decode_steps"] += 1
        self._counts["slots_busy"] += len(plan.rows)
        self._counts["slots_offered"] += self._cache.slots
        self._accept(plan.rows, drawn)

    def _draw(
        self, sequences: Sequence[SequenceProgress], logits_RV: Tensor, rows: SamplingRows | None = None
    ) -> list[Draw]:
        if rows is None:
            rows = forward.sampling_rows(sequences, logits_RV.shape[-1], logits_RV.device)
        return sample(logits_RV, rows, [sequence.uniform for sequence in sequences])

    def _accept(self, sequences: Sequence[SequenceProgress], draws: list[Draw]) -> None:
        for sequence, drawn in zip(list(sequences), draws, strict=True):
            progress = sequence.owner
            if progress.request.id not in self._running:
                continue  # another of its sequences failed it, in this very loop
            if not math.isfinite(drawn.logprob):
                self._fail(progress, NotFinite(adapted=progress.adapter is not None))
                continue
            try:
                sequence.accept(drawn)
            except Exception as error:
                self._fail(progress, error)
                continue
            self._counts["sampled"] += 1
            if sequence.stop_reason:
                self._retire(sequence)

    def _retire(self, sequence: SequenceProgress) -> None:
        """A sequence has ended. Its slot goes to a sibling that waits, for the prompt is in it already, or is freed."""
        progress = sequence.owner
        if progress.unstarted:
            progress.start_next(sequence.slot)
            sequence.slot = -1
            self._plan = None
            return
        self._free_slot(sequence)
        if progress.done:
            self._finished.append(progress.finished())
            self._forget(progress)


class NotFinite(ArithmeticError):
    """A sequence's logits are NaN or infinite."""

    def __init__(self, *, adapted: bool) -> None:
        super().__init__("the logits are not finite" + ("; are this sampler's weights?" if adapted else ""))
        self.adapted = adapted


def _broken(request_id: str, error: Exception) -> Finished:
    """The end of a request that broke. Only what we word ourselves goes to the user: the rest may name files."""
    if isinstance(error, NotFinite):
        return Finished(request_id, error=RequestError(str(error), "user" if error.adapted else "server"))
    message = f"generation failed ({type(error).__name__}); the generator's log has the details"
    return Finished(request_id, error=RequestError(message, "server"))
