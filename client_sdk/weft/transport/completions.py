"""One long poll for all the requests of a sampler, instead of one each (the flag `sample_use_retrieve_futures`).

It says which requests have completed; each result is then fetched by itself. The poll runs while somebody waits.
"""

from __future__ import annotations

import asyncio
import time

from weft.errors import APIConnectionError, APIStatusError
from weft.transport.http import Call, Transport, encode, error_of, parse
from weft.transport.poll import POLL_TIMEOUT_S, wait_or_raise
from weft.transport.retry import Attempts
from weft.wire.service import FuturesRetrieveRequest, FuturesRetrieveResponse, SamplingSessionFuturesTarget


class CompletionPoll:
    """The requests of one sampler, or of one clone of it. Runs on the background loop."""

    def __init__(self, transport: Transport, sampler_id: str, clone: int) -> None:
        self._transport = transport
        self._target = SamplingSessionFuturesTarget(sampling_session_id=sampler_id, cloned_sampler_id=clone)
        self._cursor = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}
        #: Completions that arrived before the answer to their own submission, which names them.
        self._early: set[str] = set()
        self._retrieved: list[str] = []
        self._polling: asyncio.Task[None] | None = None

    async def wait(self, request_id: str) -> None:
        """Return when the request has completed, well or not."""
        if request_id in self._early:
            self._early.discard(request_id)
            return
        waiter = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        if self._polling is None or self._polling.done():
            self._polling = asyncio.ensure_future(self._poll())
        try:
            await waiter
        finally:
            self._waiting.pop(request_id, None)

    def retrieved(self, request_id: str) -> None:
        """Note that the result has been fetched: the next poll tells the server that it need not keep the result."""
        self._retrieved.append(request_id)

    async def _poll(self) -> None:
        """Poll while somebody waits; an error of the poll is raised to all who wait."""
        try:
            attempts: Attempts | None = None
            while self._waiting:
                began = time.monotonic()
                try:
                    await self._round()
                    attempts = None
                except (APIStatusError, APIConnectionError) as error:
                    attempts = attempts or Attempts(self._transport.poll_policy, began)
                    await wait_or_raise(error, attempts)
        except Exception as error:
            for waiter in self._waiting.values():
                if not waiter.done():
                    waiter.set_exception(error)

    async def _round(self) -> None:
        """One poll: acknowledge what was fetched, learn what has completed since."""
        told = self._retrieved[:1000]
        request = FuturesRetrieveRequest(target=self._target, prev_cursor=self._cursor, retrieved_request_ids=told)
        call = Call("POST", "/retrieve_futures", encode(request.body()), timeout_s=POLL_TIMEOUT_S, poll=True)
        response = await self._transport.once(call)
        if response.status_code == 408:
            return
        if not response.is_success:
            raise error_of(response)
        del self._retrieved[: len(told)]
        answer = parse(response, FuturesRetrieveResponse)
        self._cursor = answer.cursor
        for completion in answer.completions:
            waiter = self._waiting.pop(completion.request_id, None)  # now: the last one ends the polling
            if waiter is None:
                self._early.add(completion.request_id)
            elif not waiter.done():
                waiter.set_result(None)
