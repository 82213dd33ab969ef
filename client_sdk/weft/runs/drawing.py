"""A sample while it is drawn: its tokens can be read as they come, it can be stopped early, or simply waited for."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

from weft.errors import APIConnectionError, APIStatusError, WeftError
from weft.future import APIFuture, background
from weft.transport.http import Transport
from weft.transport.retry import passes_by_itself
from weft.wire.sampling import SampledSequence, SampleResponse, TokensDrawn
from weft.wire.service import CancelFutureRequest, StreamFutureRequest

log = logging.getLogger("weft")

#: How often a stop is sent again until the sample has ended.
STOP_AGAIN_S = 1.0
#: Pause before a broken stream is opened again.
READ_AGAIN_S = 0.5


class Drawing:
    """The state of one sample request. Lives on the background loop."""

    def __init__(self) -> None:
        self._accepted: asyncio.Future[tuple[Transport, str]] | None = None
        self._parts: list[TokensDrawn] = []
        self._told = defaultdict[int, list[int]](list)  # tokens of each sequence
        self._anew = False  # tokens that were already told were replaced by others
        self._over = False
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    def accepted(self, transport: Transport, request_id: str, *, stream: bool) -> None:
        """The server has accepted the request under this id."""
        if self._reading is not None:  # the stream of a draw that the server has lost
            self._reading.cancel()
        self._acceptance().set_result((transport, request_id))
        if stream:
            self._reading = asyncio.ensure_future(self._read(transport, request_id))

    @property
    def told(self) -> bool:
        """True if some of the sample's tokens may have been read already."""
        return bool(self._parts)

    def _acceptance(self) -> asyncio.Future[tuple[Transport, str]]:
        if self._accepted is None or self._accepted.done():
            self._accepted = asyncio.get_running_loop().create_future()
        return self._accepted

    def finish(self, response: SampleResponse | None) -> None:
        """Note that the sample has ended, and take the tokens that the stream did not bring from the result."""
        if self._reading is not None:
            self._reading.cancel()
        for sample, sequence in enumerate(response.sequences if response is not None else ()):
            self._hear(_whole(sample, sequence))
        self._over = True
        self._changed.set()

    async def stop(self) -> None:
        """Ask the server to end the sample, once the server has accepted it."""
        while not self._over:
            waiting = self._accepted if self._accepted is not None else self._acceptance()
            changed = asyncio.ensure_future(self._changed_again())
            await asyncio.wait((waiting, changed), return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if waiting.done() and not self._over:
                transport, request_id = waiting.result()
                body = CancelFutureRequest(request_id=request_id).model_dump_json().encode()
                try:
                    await transport.post_once("/cancel_future", body)
                except WeftError as error:
                    log.debug("a stop was not told: %s", error)
                await asyncio.wait((asyncio.ensure_future(self._ended()),), timeout=STOP_AGAIN_S)

    async def part(self, index: int) -> TokensDrawn | None:
        """Part number `number`, once it is there; None if the sample ended with fewer parts."""
        while index >= len(self._parts) and not (self._over or self._anew):
            await self._changed_again()
        if index >= len(self._parts) and self._anew:
            raise WeftError(
                "this sample was drawn anew, from newer weights of its run: the tokens read so far are not its "
                "beginning; result() has all of it"
            )
        return self._parts[index] if index < len(self._parts) else None

    async def _changed_again(self) -> None:
        if not self._over:
            self._changed.clear()
            await self._changed.wait()

    async def _ended(self) -> None:
        while not self._over:
            await self._changed_again()

    async def _read(self, transport: Transport, request_id: str) -> None:
        body = StreamFutureRequest(request_id=request_id).model_dump_json().encode()
        while True:
            try:
                async for name, data in transport.events("/stream_future", body):
                    if name == "open":  # the server stops, and goes on with the sample once it is back
                        continue
                    if name:  # it has ended; the result says how
                        return
                    self._hear(TokensDrawn.model_validate(json.loads(data)))
            except (WeftError, ValueError) as error:  # ValueError: an event of another form
                passes = isinstance(error, APIStatusError) and passes_by_itself(error.status_code)
                if not passes and not isinstance(error, APIConnectionError):
                    log.warning("the tokens of request %s come at its end: %s", request_id, error)
                    return
                log.debug("a stream broke off: %s", error)
            await asyncio.sleep(READ_AGAIN_S)

    def _hear(self, part: TokensDrawn) -> None:
        known = self._told[part.sample]
        skip = len(known) - part.start
        both = min(max(0, skip), len(part.tokens))
        if known[part.start :][:both] != part.tokens[:both]:
            self._anew = True
            self._changed.set()
        if self._anew or not 0 <= skip < len(part.tokens):
            return
        known += part.tokens[skip:]
        rest = part if not skip else _behind(part, skip)
        self._parts.append(rest)
        self._changed.set()


def _behind(part: TokensDrawn, skip: int) -> TokensDrawn:
    fields = ("tokens", "logprobs", "versions", "tops")
    return part.model_copy(
        update={"start": part.start + skip} | {field: getattr(part, field)[skip:] for field in fields}
    )


def _whole(sample: int, sequence: SampledSequence) -> TokensDrawn:
    versions = [span.version for span in sequence.policy_versions for _ in range(span.length)]
    rows = [row or [] for row in sequence.topk_logprobs or []]
    return TokensDrawn(
        sample=sample,
        start=0,
        tokens=sequence.tokens,
        logprobs=sequence.logprobs or [],
        versions=versions or [0] * len(sequence.tokens),
        tops=[([token for token, _ in row], [logprob for _, logprob in row]) for row in rows],
    )


class SampleFuture(APIFuture[SampleResponse]):
    """A sample on its way. Iterating (`for`, `async for`) gives its tokens in parts: while they are drawn if it was
    asked for with `stream=True`, at the end otherwise."""

    def __init__(self, future: Future[SampleResponse], drawing: Drawing) -> None:
        super().__init__(future)
        self._drawing = drawing

    @classmethod
    def begin(cls, work: Callable[[Drawing], Coroutine[Any, Any, SampleResponse]]) -> SampleFuture:
        """Start `work` in the background. `work` gets the drawing and reports its progress there."""
        drawing = Drawing()

        async def draw() -> SampleResponse:
            response = None
            try:
                response = await work(drawing)
            finally:
                drawing.finish(response)
            return response

        return cls(background().run(draw()), drawing)

    def stop(self, timeout: float | None = None) -> SampleResponse:
        """End the drawing now and return what there is: the tokens so far with their logprobs and policy versions, and
        what is billed for them (`usage`). One that had not begun has empty sequences and costs nothing; one that has
        ended is returned as it is."""
        background().run(self._drawing.stop())
        return self.result(timeout)

    async def stop_async(self, timeout: float | None = None) -> SampleResponse:  # noqa: ASYNC109
        """`stop`, awaited."""
        background().run(self._drawing.stop())
        return await self.result_async(timeout)

    def __iter__(self) -> Iterator[TokensDrawn]:
        index = 0
        while (part := background().run(self._drawing.part(index)).result()) is not None:
            yield part
            index += 1
        self.result()

    async def __aiter__(self) -> AsyncIterator[TokensDrawn]:
        index = 0
        while (part := await asyncio.wrap_future(background().run(self._drawing.part(index)))) is not None:
            yield part
            index += 1
        await self
