"""The requests that one vLLM is serving: load the adapter, generate the sequences, collect the result.

Each sequence is a separate request to vLLM, with its own seed, so that sequences end, stop and are cancelled
independently. Sequences with stop strings are watched here as their tokens come, by the rule of all our engines: vLLM's
own stop strings need its tokenizer and cut by other rules. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from store.blobs.contract import Weights, is_lasting
from workers.generator.adapters import AdapterUnusable
from workers.generator.engine import Finished, RequestError
from workers.generator.requests.refusals import refused
from workers.generator.tokens.stop import StopRule
from workers.generator.vllm import translate
from workers.generator.vllm.adapters import NotServable
from workers.generator.vllm.client import VllmClient, VllmLost, VllmRefused
from workers.generator.vllm.policies import Policies
from workers.generator.vllm.progress import RequestProgress, SequenceProgress
from workers.generator.vllm.server import VllmServer, reserve
from workers.generator.vllm.tally import Tally

log = logging.getLogger(__name__)

#: Seconds until an abort is repeated, in case vLLM had not received the request yet.
_ABORT_AGAIN_S = 0.05

FAILED = "generation failed; the generator's log has the details"


class Serving:
    def __init__(
        self,
        server: VllmServer,
        policies: Policies,
        slots: int,
        eos_token_ids: tuple[int, ...],
        tally: Tally,
        lossy_adapters: bool = False,
    ) -> None:
        """At most `slots` sequences are with vLLM at a time, and `reserve(slots)` of `beyond` requests; all that end go
        to `tally`. `lossy_adapters`: serve adapters also where vLLM's numbers are not the trainer's."""
        self._lossy_adapters = lossy_adapters
        self._server, self._policies, self._eos, self._tally = server, policies, eos_token_ids, tally
        self._slots, self._reserve = asyncio.Semaphore(slots), asyncio.Semaphore(reserve(slots))
        self._requests: dict[str, RequestProgress] = {}
        self._life = 0  # the value of `server.lives` that `policies` belong to
        self._renewing = asyncio.Lock()

    async def serve(self, progress: RequestProgress) -> None:
        """Serve one request to its end."""
        request_id = progress.request.id
        self._requests[request_id] = progress
        progress.task = asyncio.current_task()
        end = Finished(request_id)
        try:
            end = await self._generate(progress)
        except asyncio.CancelledError:
            end = progress.finished()
        except Exception as error:
            end = _fault(request_id, error)
        finally:
            for task in progress.work:
                task.cancel()
            del self._requests[request_id]
            await self._release(progress)
            self._tally.end(end, taken=progress.wanted is not None)
            if progress.wanted is not None:
                progress.wanted.set_result(end)

    async def cancel(self, request_id: str) -> Finished | None:
        """End a request. Sequences that wait for a slot end at once, others with the tokens that vLLM has for them."""
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

    async def swap(self, name: str, folder: Weights) -> None:
        """From now on `name` means the weights in `folder`."""
        if not self._server.ready.is_set():
            return  # the next request loads the weights
        try:
            await self._synchronise()
            await self._policies.swap(name, folder, in_place=self._server.swaps)
        except VllmLost:
            self._server.lost()
        except (AdapterUnusable, VllmRefused, OSError) as error:
            log.warning("samples that are running stay on older weights %r: %s", name, error)

    async def run_moved(self, run: str, version: int) -> None:
        """Stop sequences that have become too old."""
        stale: list[SequenceProgress] = []
        for progress in [p for p in self._requests.values() if p.request.run == run]:
            progress.run_version = version
            stale += [one for one in progress.sequences if one.vllm_id and progress.too_old(one.version)]
        for sequence in stale:
            sequence.stale = True
        await self._abort(stale)

    async def _generate(self, progress: RequestProgress) -> Finished:
        request = progress.request
        await self._server.ready.wait()
        life = await self._synchronise()
        if (why := translate.beyond(request, tempered=self._server.tempered)) is not None:
            return _declined(request.id, why, "request")
        if request.adapter and self._server.rounds and not self._lossy_adapters:
            return _declined(request.id, f"its vLLM rounds what training does not: {self._server.rounds}", "weights")
        try:
            if request.adapter:
                progress.pushed = await self._policies.acquire(request.adapter, request.adapter_folder)
            progress.work = [asyncio.create_task(self._sequence(progress, one)) for one in progress.sequences]
            for fault in await asyncio.gather(*progress.work, return_exceptions=True):
                if isinstance(fault, Exception):  # not for the CancelledError of a waiting sequence
                    raise fault
        except VllmLost:
            if life == self._server.lives:
                self._server.lost()
            raise
        return progress.finished()

    async def _synchronise(self) -> int:
        """Forget the adapters that vLLM had before its last restart. Returns the present `server.lives`. Callers leave
        in order of arrival, so requests and swaps reach `policies` in their order."""
        async with self._renewing:
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
        """One sequence: wait for a slot, generate, take the answer."""
        request, pushed = progress.request, progress.pushed
        slots = self._reserve if progress.beyond else self._slots
        await slots.acquire()
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
                "cache_salt": translate.cache_salt(request.tenant, pushed.salt if pushed else ""),
            }
            if any(request.sampling.stop_strings):  # its tokens must be decoded as they come
                answer = await generate_watched(self._server.client, body, progress.rule)
            else:
                answer = await self._server.client.generate(body)
        finally:
            sequence.vllm_id = ""
            slots.release()
            self._tally.sequence_ended(request.id)
        progress.take(sequence, answer)

    async def _abort(self, sequences: list[SequenceProgress]) -> None:
        """Abort a sequence's requests, again and again until vLLM has ended them: one may still be on its way there."""
        try:
            while ids := [sequence.vllm_id for sequence in sequences if sequence.vllm_id]:
                await self._server.client.abort(ids)
                await asyncio.sleep(_ABORT_AGAIN_S)
        except (VllmLost, VllmRefused) as error:
            log.warning("vLLM could not be told to stop %d sequences: %s", len(sequences), error)


def _fault(request_id: str, error: Exception) -> Finished:
    """The end of a request for which `error` was raised."""
    match error:
        case NotServable():
            return _declined(request_id, str(error), "weights")
        case AdapterUnusable():
            return refused(request_id, str(error))
        case VllmLost():
            log.warning("request %s is given back: %s", request_id, error)
            return _declined(request_id, "vLLM was lost while it generated", "again", "server")
        case VllmRefused(status=status) if status < 500:
            log.warning("request %s: vLLM refuses it: %s", request_id, error)
            return refused(request_id, f"vLLM refuses the request: {error}")
        case OSError() if not is_lasting(error):
            log.warning("request %s waits for a disk: %s", request_id, error)
            return _declined(request_id, FAILED, "later", "server")
    log.error("request %s failed", request_id, exc_info=error)
    return Finished(request_id, error=RequestError(FAILED, "server"))


def _declined(request_id: str, why: str, elsewhere: Any, category: Any = "user") -> Finished:
    return Finished(request_id, error=RequestError(why, category, elsewhere))


async def generate_watched(client: VllmClient, body: dict[str, Any], rule: StopRule) -> dict[str, Any]:
    """As `client.generate`, ended where `rule` stops it. When streaming, vLLM returns no prompt logprobs: for them the
    prompt is computed once more."""
    params, scores = dict(body["sampling_params"]), None
    if "prompt_logprobs" in params:
        scored = await client.generate({**body, "sampling_params": {**params, "max_tokens": 1}})
        scores = scored["prompt_logprobs"]
        del params["prompt_logprobs"]
    tokens: list[int] = []
    content: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    versions, stopped, watch = None, False, rule.watch()
    async for piece in client.stream({**body, "sampling_params": params}):
        usage = piece.get("usage") or usage
        for choice in piece["choices"]:
            versions = choice.get("weight_versions") or versions
            for entry in (choice["logprobs"] or {}).get("content") or ():
                if not stopped:
                    tokens.append(entry["token_id"])
                    content.append(entry)
                    stopped = watch.check(tokens) == "stop"
            if stopped and choice.get("finish_reason") is None:
                await client.abort([body["request_id"]])
    choice = {"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": versions}
    return {"choices": [choice], "usage": usage, "prompt_logprobs": scores}
