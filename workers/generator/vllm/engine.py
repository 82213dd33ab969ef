"""A generator engine that hands every sequence to vLLM and keeps the contract around it.

vLLM batches, samples and caches; an event loop in a thread of its own talks to it. `add` and `step` only exchange
requests and results with that thread. Each sequence is a request of its own to vLLM, with a seed of its own, so that
sequences end, stop and are cancelled apart. When vLLM dies, what it had is given back ("again"): the queue hands it to
whoever has room, this engine too once its vLLM is up again.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import shutil
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from workers.generator.adapters import AdapterUnusable
from workers.generator.engine import (
    EngineStats,
    Finished,
    GenerateRequest,
    RequestError,
)
from workers.generator.refusals import refused, request_fault
from workers.generator.stop import DecodeText, NoTokenizer, StopRule
from workers.generator.vllm import translate
from workers.generator.vllm.adapters import NotServable, Room
from workers.generator.vllm.client import VllmLost, VllmRefused
from workers.generator.vllm.policies import Policies
from workers.generator.vllm.progress import RequestProgress, SequenceProgress
from workers.generator.vllm.server import Launch, VllmFailed, VllmServer
from workers.generator.vllm.slots import Slots
from workers.generator.vllm.watch import generate_watched
from workers.model.config import DecoderConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How long `step` waits for something to end: about a decode step, and what work that arrives waits at most.
STEP_S = 0.01
#: Of a cancelled request: how long before vLLM is told again, in case it had not known the request yet.
_ABORT_AGAIN_S = 0.05

FAILED = "generation failed; the generator's log has the details"


class VllmEngine:
    """An `Engine`. Driven by one thread, as any other; `close` ends its own thread and its vLLM."""

    def __init__(
        self,
        config: DecoderConfig,
        eos_token_ids: tuple[int, ...],
        *,
        slots: int,
        context: int,
        room: Room,
        folder: Path,
        launch: Launch | None = None,
        url: str = "",
        decode_text: DecodeText | None = None,
    ) -> None:
        """vLLM as a child (`launch`) or at `url`; with a URL, `folder`, where adapters are written, must be the same
        for it. What is in `folder` is of an earlier life and is deleted."""
        self._config, self._eos, self._slots, self._context = config, eos_token_ids, slots, context
        self._decode_text = decode_text
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}  # request -> sequences of it that have not ended
        self._requests: dict[str, RequestProgress] = {}
        self._life = 0
        self._counts = dict.fromkeys(("steps", "busy", "prefill", "hit", "sampled"), 0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._call(self._begin(folder, launch, url, room)).result()

    async def _begin(self, folder: Path, launch: Launch | None, url: str, room: Room) -> None:
        self._server = VllmServer(launch, url)
        self._policies = Policies(self._server.client, self._config, room, folder)
        self._room_left = Slots(self._slots)
        self._keeping = asyncio.create_task(self._server.keep())

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Until vLLM has answered its first requests. Raises VllmFailed when it does not come up."""

        async def ready() -> None:
            wait = asyncio.create_task(self._server.ready.wait())
            await asyncio.wait({wait, self._keeping}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            wait.cancel()

        self._call(ready()).result()
        self._raise_failure()
        if not self._server.ready.is_set():
            raise VllmFailed(f"vLLM was not ready after {timeout_s} s")
        self._context = min(self._context, self._server.longest)

    @property
    def url(self) -> str:
        """Where its vLLM is."""
        return self._server.url

    def close(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._server.close()

        if self._thread.is_alive():
            self._call(end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # -- the contract

    @property
    def free_slots(self) -> int:
        if not self._server.ready.is_set():
            return 0
        with self._lock:
            return max(0, self._slots - sum(self._open.values()))

    @property
    def busy(self) -> bool:
        return bool(self._open) or not self._finished.empty()

    def add(self, request: GenerateRequest) -> None:
        fault = request_fault(request, self._context, self._config.vocab_size)
        if request.id in self._open:
            fault = f"request {request.id} is here already"
        if fault is not None:
            self._finished.put(refused(request.id, fault))
            return
        try:
            progress = self._progress(request)
        except NoTokenizer as error:
            self._finished.put(refused(request.id, str(error)))
            return
        with self._lock:
            self._open[request.id] = request.num_samples
        self._call(self._serve(progress))

    def step(self) -> list[Finished]:
        self._raise_failure()
        found = []
        try:
            found.append(self._finished.get(timeout=STEP_S))
            while True:
                found.append(self._finished.get_nowait())
        except queue.Empty:
            pass
        running = self.stats().running
        self._counts["steps"] += running > 0
        self._counts["busy"] += running
        return found

    def cancel(self, request_id: str) -> Finished | None:
        return self._call(self._cancel(request_id)).result()

    def swap_adapter(self, name: str, folder: Path) -> None:
        async def swap() -> None:
            if not self._server.ready.is_set():
                return  # the next request brings the weights
            try:
                await self._synchronise()
                await self._policies.swap(name, folder, in_place=self._server.swaps)
            except VllmLost:
                self._server.lost()
            except (AdapterUnusable, VllmRefused) as error:
                log.warning("samples that are running stay on older weights %r: %s", name, error)

        self._call(swap()).result()

    def run_moved(self, run: str, version: int) -> None:
        async def stop_stale() -> None:
            stale: list[SequenceProgress] = []
            for progress in [p for p in self._requests.values() if p.request.run == run]:
                progress.run_version = version
                stale += [one for one in progress.sequences if one.vllm_id and progress.too_old(one.version)]
            for sequence in stale:
                sequence.stale = True
            await self._abort(stale)

        self._call(stop_stale()).result()

    def stats(self) -> EngineStats:
        with self._lock:
            unfinished = sum(self._open.values())
        return EngineStats(
            decode_steps=self._counts["steps"],
            slots_busy=self._counts["busy"],
            slots_offered=self._counts["steps"] * self._slots,
            prefill_tokens=self._counts["prefill"],
            cache_hit_tokens=self._counts["hit"],
            sampled_tokens=self._counts["sampled"],
            running=min(unfinished, self._slots),
            waiting=max(0, unfinished - self._slots),
            adapters_loaded=len(self._policies),
        )

    # -- in the thread of the event loop

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _raise_failure(self) -> None:
        if self._server.failure is not None:
            raise self._server.failure

    def _progress(self, request: GenerateRequest) -> RequestProgress:
        limit = self._context - len(request.prompt) + 1
        if request.sampling.max_tokens is not None:
            limit = min(limit, request.sampling.max_tokens)
        rule = StopRule(request.sampling, self._eos, limit, self._decode_text)
        return RequestProgress(request, rule, self._config.vocab_size)

    async def _serve(self, progress: RequestProgress) -> None:
        """One request, from its adapter to its end."""
        request = progress.request
        self._requests[request.id] = progress
        progress.task = asyncio.current_task()
        end, life = Finished(request.id), 0
        try:
            await self._server.ready.wait()
            life = await self._synchronise()
            if (why := translate.beyond(request, tempered=self._server.tempered)) is not None:
                end = _declined(request.id, why, "request")
                return
            if request.adapter:
                progress.pushed = await self._policies.acquire(request.adapter, request.adapter_folder)
            progress.work = [asyncio.create_task(self._sequence(progress, one)) for one in progress.sequences]
            for fault in await asyncio.gather(*progress.work, return_exceptions=True):
                if isinstance(fault, Exception):  # not the cancelling of one that waited
                    raise fault
            end = self._end(progress)
        except NotServable as error:
            end = _declined(request.id, str(error), "weights")
        except AdapterUnusable as error:
            end = refused(request.id, str(error))
        except VllmLost as error:
            log.warning("request %s is given back: %s", request.id, error)
            if life == self._server.lives:
                self._server.lost()
            end = _declined(request.id, "vLLM was lost while it generated", "again", "server")
        except VllmRefused as error:
            log.warning("request %s: vLLM refuses it: %s", request.id, error)
            if error.status < 500:
                end = refused(request.id, f"vLLM refuses the request: {error}")
            else:
                end = Finished(request.id, error=RequestError(FAILED, "server"))
        except asyncio.CancelledError:
            end = self._end(progress)
        except Exception:
            log.exception("request %s failed", request.id)
            end = Finished(request.id, error=RequestError(FAILED, "server"))
        finally:
            for task in progress.work:
                task.cancel()
            del self._requests[request.id]
            await self._release(progress)
            with self._lock:
                self._open.pop(request.id, None)
                if progress.wanted is None:
                    self._finished.put(end)
                else:
                    progress.wanted.set_result(end)

    async def _synchronise(self) -> int:
        """Forget what an earlier life of vLLM knew. Returns which this one is."""
        if self._life != self._server.lives:
            self._life = self._server.lives
            self._policies.forget()
            if self._server.swaps:
                await self._server.client.label(0)
        return self._life

    async def _release(self, progress: RequestProgress) -> None:
        if progress.pushed is not None:
            try:
                await self._policies.release(progress.pushed)
            except (VllmLost, VllmRefused) as error:
                log.warning("an adapter could not be unloaded: %s", error)

    async def _sequence(self, progress: RequestProgress, sequence: SequenceProgress) -> None:
        """One sequence: wait for a slot, generate, take the answer apart."""
        request, pushed = progress.request, progress.pushed
        await self._room_left.take(request.priority)
        try:
            sequence.version = progress.version
            if progress.too_old(sequence.version):
                sequence.result = replace(sequence.result, stale=True)
                return
            sequence.vllm_id, sequence.started = f"{request.id}:{sequence.sample}:{self._life}", True
            body = {
                "model": pushed.name if pushed else self._server.base,
                "request_id": sequence.vllm_id,
                "token_ids": request.prompt,
                "sampling_params": translate.params_of(request, sequence.sample, progress.rule.limit, self._eos),
                "priority": -request.priority,
                "cache_salt": translate.cache_salt(request.tenant, pushed.salt if pushed else ""),
            }
            if translate.reads_text(request):
                answer = await generate_watched(self._server.client, body, progress.rule)
            else:
                answer = await self._server.client.generate(body)
        finally:
            sequence.vllm_id = ""
            self._room_left.give()
            with self._lock:
                self._open[request.id] -= 1
        progress.take(sequence, answer)

    def _end(self, progress: RequestProgress) -> Finished:
        end = progress.finished()
        self._counts["prefill"] += end.facts.prefill
        self._counts["hit"] += end.facts.cache_hit
        self._counts["sampled"] += end.facts.sample
        return end

    async def _cancel(self, request_id: str) -> Finished | None:
        """Sequences that wait for a slot end at once, those that vLLM has with what they have."""
        progress = self._requests.get(request_id)
        if progress is None or progress.task is None:
            return None
        progress.wanted = asyncio.get_running_loop().create_future()
        if not progress.work:
            progress.task.cancel()
        for task, sequence in zip(progress.work, progress.sequences, strict=False):
            if not sequence.started:
                task.cancel()
        await self._abort(progress.sequences)
        return await progress.wanted

    async def _abort(self, sequences: list[SequenceProgress]) -> None:
        """Tell vLLM, until it has let go of them: a request may still be on its way there."""
        try:
            while ids := [sequence.vllm_id for sequence in sequences if sequence.vllm_id]:
                await self._server.client.abort(ids)
                await asyncio.sleep(_ABORT_AGAIN_S)
        except (VllmLost, VllmRefused) as error:
            log.warning("vLLM could not be told to stop %d sequences: %s", len(sequences), error)


def _declined(request_id: str, why: str, elsewhere: Any, category: Any = "user") -> Finished:
    return Finished(request_id, error=RequestError(why, category, elsewhere))
