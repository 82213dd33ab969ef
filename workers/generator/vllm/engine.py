"""A generator engine that hands every sequence to vLLM and keeps the contract around it.

vLLM batches, samples and caches; an event loop in a thread of its own talks to it (`serving`). `add` and `step` only
exchange requests and results with that thread (`tally`). When vLLM dies, its requests are given back ("again"): the
queue hands them to any engine with free slots, including this one once its vLLM is up again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from store.blobs.contract import Weights
from workers.generator.engine import (
    EngineStats,
    Finished,
    GenerateRequest,
    SoFar,
)
from workers.generator.requests.refusals import refused, request_fault
from workers.generator.tokens.stop import DecodeText, NoTokenizer, StopRule
from workers.generator.vllm.adapters import LoraLimits
from workers.generator.vllm.policies import Policies
from workers.generator.vllm.progress import RequestProgress
from workers.generator.vllm.server import Launch, VllmFailed, VllmServer, reserve
from workers.generator.vllm.serving import Serving
from workers.generator.vllm.tally import Tally
from workers.model.config import DecoderConfig
from workers.scratch import scratch

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How long `step` waits for a request to end: about one decode step; new work waits at most this long for it.
STEP_S = 0.01


class VllmEngine:
    """An `Engine`. Driven by one thread, as any other; `close` ends its own thread and its vLLM."""

    def __init__(
        self,
        config: DecoderConfig,
        eos_token_ids: tuple[int, ...],
        *,
        slots: int,
        context: int,
        limits: LoraLimits,
        folder: Path | None = None,
        launch: Launch | None = None,
        url: str = "",
        decode_text: DecodeText | None = None,
        lossy_adapters: bool = False,
        rounds: str = "",
    ) -> None:
        """vLLM as a child (`launch`) or at `url`. Adapters are written to `folder`, which a vLLM at a URL must see
        under the same path; it is emptied at the start and deleted at the end. None: to a temporary one. `rounds`:
        which weights it rounds that the trainer does not. `lossy_adapters`: serve adapters even then, or if its options
        round weights or keys."""
        self._config, self._eos, self._slots, self._context = config, eos_token_ids, slots, context
        self._decode_text, self._lossy_adapters = decode_text, lossy_adapters
        self._ends = ExitStack()
        place = self._ends.enter_context(scratch("vllm"))
        self._folder = folder = folder or place / "adapters"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        self._tally = Tally()
        self._steps = self._busy = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._call(self._begin(place, launch, url, limits, rounds)).result()

    async def _begin(self, place: Path, launch: Launch | None, url: str, limits: LoraLimits, rounds: str) -> None:
        self._server = VllmServer(place, launch, url, rounds)
        self._policies = Policies(self._server.client, self._config, limits, self._folder)
        self._serving = Serving(self._server, self._policies, self._slots, self._eos, self._tally, self._lossy_adapters)
        self._keeping = asyncio.create_task(self._server.keep())

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until vLLM has answered its first requests. Raises VllmFailed if it does not come up."""

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
        """The address of the vLLM that this engine uses."""
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
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ends.close()

    # -- the contract

    @property
    def free_slots(self) -> int:
        if not self._server.ready.is_set():
            return 0
        return max(0, self._slots - self._tally.unfinished + self._tally.beyond)

    @property
    def yields(self) -> int:
        """vLLM sets nothing aside while it has room for keys and values, but takes more sequences."""
        return max(0, reserve(self._slots) - self._tally.beyond) if self._server.ready.is_set() else 0

    @property
    def busy(self) -> bool:
        return self._tally.busy

    def add(self, request: GenerateRequest) -> None:
        fault = request_fault(request, self._context, self._config.vocab_size)
        if request.id in self._tally:
            fault = f"request {request.id} is here already"
        if fault is not None:
            self._tally.refuse(refused(request.id, fault))
            return
        try:
            progress = self._progress(request)
        except NoTokenizer as error:
            self._tally.refuse(refused(request.id, str(error)))
            return
        progress.beyond = self.free_slots == 0 and self.yields > 0
        self._tally.enter(request, beyond=progress.beyond)
        self._call(self._serving.serve(progress))

    def step(self) -> list[Finished]:
        self._raise_failure()
        found = self._tally.take(STEP_S)
        running = self.stats().running
        self._steps += running > 0
        self._busy += running
        return found

    def cancel(self, request_id: str) -> Finished | None:
        return self._call(self._serving.cancel(request_id)).result()

    def so_far(self, request_id: str) -> list[SoFar]:
        return []  # vLLM is asked for whole sequences, so there is nothing to stream

    def swap_adapter(self, name: str, folder: Weights) -> None:
        self._call(self._serving.swap(name, folder)).result()

    def run_moved(self, run: str, version: int) -> None:
        self._call(self._serving.run_moved(run, version)).result()

    def stats(self) -> EngineStats:
        unfinished = self._tally.unfinished
        return EngineStats(
            **self._tally.totals,
            decode_steps=self._steps,
            slots_busy=self._busy,
            slots_offered=self._steps * self._slots,
            running=min(unfinished, self._slots),
            waiting=max(0, unfinished - self._slots),
            adapters_loaded=len(self._policies),
        )

    def _progress(self, request: GenerateRequest) -> RequestProgress:
        limit = request.most_tokens(self._context)
        rule = StopRule(request.sampling, self._eos, limit, self._decode_text, request.prompt)
        return RequestProgress(request, rule, self._config.vocab_size)

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _raise_failure(self) -> None:
        if self._server.failure is not None:
            raise self._server.failure
