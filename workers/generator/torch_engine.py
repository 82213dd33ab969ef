"""TorchEngine: continuous batching of our own decoder over a static KV cache.

Each step first gives free slots to sequences that wait for one, then prefills queued requests in order (up to a
budget of prompt tokens, so that running sequences never wait long), then advances every running sequence by one token.
Sequences join and leave between steps. Requests start first come, first served; who comes first is the queue's affair.

What a request gets depends on nothing but itself: its rows see only its slots, its adapter and its random numbers.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.generator import forward
from workers.generator.adapters import AdapterCache, AdapterUnusable
from workers.generator.engine import EngineStats, Finished, GenerateRequest, RequestError
from workers.generator.kv_cache import KVCache
from workers.generator.progress import RequestProgress, SequenceProgress, refused, request_fault
from workers.generator.sampling import SamplingRows, sample
from workers.generator.stop import DecodeText, NoTokenizer, StopRule
from workers.model.adapter import Adapter, load_adapter
from workers.model.adapter_pool import AdapterPool
from workers.model.decoder import Decoder

log = logging.getLogger(__name__)

DEFAULT_PREFILL_TOKENS = 2048
DEFAULT_ADAPTER_BYTES = 2 << 30


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
        decode_text: DecodeText | None = None,
    ) -> None:
        """`slots` sequences at a time, each of at most `context` tokens. `prefill_tokens` caps the prompt tokens of a
        step; a longer prompt gets a step of its own."""
        config = decoder.config
        self._decoder = decoder
        self._eos_token_ids = eos_token_ids
        self._prefill_tokens = prefill_tokens
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
        self._queue: deque[RequestProgress] = deque()  # not prefilled
        self._running: dict[str, RequestProgress] = {}  # prefilled, not done
        self._finished: list[Finished] = []
        self._plan: forward.DecodePlan | None = None  # of all running sequences, while they stay the same
        self._counts = dict.fromkeys(("decode_steps", "slots_busy", "slots_offered", "prefill_tokens", "sampled"), 0)

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
            self._queue.append(self._progress(request))
        except (AdapterUnusable, NoTokenizer) as error:
            self._finished.append(refused(request.id, str(error)))
        except Exception as error:
            log.exception("request %s: cannot be prepared", request.id)
            self._finished.append(_broken(request.id, error))

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        self._survive(list(self._running.values()), self._start_sequences)
        self._survive(self._next_prefills(), self._prefill)
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
        return RequestProgress(request, rule, adapter)

    def _forget(self, progress: RequestProgress) -> None:
        """Let go of everything a request holds."""
        if self._running.pop(progress.request.id, None) is None and progress in self._queue:
            self._queue.remove(progress)
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

    def _next_prefills(self) -> list[RequestProgress]:
        """Take requests from the queue while there is a slot for each and the budget lasts. Each has its first slot."""
        batch: list[RequestProgress] = []
        tokens = 0
        while self._queue and self._free:
            tokens += len(self._queue[0].request.prompt)
            if batch and tokens > self._prefill_tokens:
                break
            progress = self._queue.popleft()
            progress.start_next(self._free.pop())
            self._running[progress.request.id] = progress
            self._plan = None
            batch.append(progress)
        return sorted(batch, key=lambda progress: progress.request.adapter)

    def _prefill(self, batch: list[RequestProgress]) -> None:
        work = [(progress, progress.sequences[0].slot) for progress in batch]
        outcomes = forward.prefill(self._decoder, self._cache, work)
        logits_RV = torch.stack([outcome.logits_V for outcome in outcomes])
        drawn = self._draw([progress.sequences[0] for progress in batch], logits_RV)
        for progress, outcome in zip(batch, outcomes, strict=True):
            progress.prefilled, progress.prompt_logits_V = True, outcome.logits_V
            progress.prompt_logprobs, progress.topk_prompt_logprobs = outcome.logprobs, outcome.topk
            self._counts["prefill_tokens"] += len(progress.request.prompt)
        self._accept([progress.sequences[0] for progress in batch], drawn)

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
    ) -> list[tuple[int, float]]:
        if rows is None:
            params = [sequence.owner.request.sampling for sequence in sequences]
            rows = SamplingRows.of(params, logits_RV.shape[-1], logits_RV.device)
        tokens, logprobs = sample(logits_RV, rows, [sequence.uniform for sequence in sequences])
        return list(zip(tokens, logprobs, strict=True))

    def _accept(self, sequences: Sequence[SequenceProgress], drawn: list[tuple[int, float]]) -> None:
        for sequence, (token, logprob) in zip(list(sequences), drawn, strict=True):
            progress = sequence.owner
            if progress.request.id not in self._running:
                continue  # another of its sequences failed it, in this very loop
            if not math.isfinite(logprob):
                self._fail(progress, NotFinite(adapted=progress.adapter is not None))
                continue
            try:
                sequence.accept(token, logprob)
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
