"""A client that leaves a stream stops its sample, however little of the answer it has read; so does the refusal that no
generator has its model."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message
from weft.wire import SamplingParams

from api.http.events import EventStream
from api.operations.streaming import Unserved
from api.routes.openai.answers import Form
from api.routes.openai.asking import Asked
from api.routes.openai.bodies import ResponsesBody
from api.routes.openai.chunks import chunks
from api.routes.openai.responses import _Stream
from api.routes.openai.text import ModelText
from api.routes.openai.waiting import ended
from api.state.afterwards import Afterwards
from scheduler.order.operations import Waiting
from workers.model.tiny import TINY_PATH


class Journal:
    """The journal of one sample, which goes on until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def cancel(self, _org_id: str, _request_id: str) -> bool:
        self.cancelled.set()
        return True

    async def outcome(self, *_: Any) -> None:
        return None  # the client has left


@pytest.mark.parametrize("door", ["chat", "responses"])
@pytest.mark.parametrize("taken", [0, 1])
def test_before_the_first_token(door: str, taken: int) -> None:
    """The first words are still in a full buffer when the client leaves."""

    async def go() -> None:
        journal, full = Journal(), asyncio.Event()

        async def receive() -> Message:
            await full.wait()
            return {"type": "http.disconnect"}

        written = 0

        async def send(message: Message) -> None:
            nonlocal written
            written += message["type"] == "http.response.body"
            if written > taken:
                full.set()
                await asyncio.Event().wait()

        async def held(_org_id: str, waiting: Any, otherwise: Any) -> Any:
            waiting.close()
            return otherwise

        service: Any = SimpleNamespace(
            journal=journal, afterwards=Afterwards(), polls=SimpleNamespace(hold=held, released=False)
        )
        who: Any = SimpleNamespace(org_id="o")
        request: Any = SimpleNamespace(receive=receive)
        target: Any = SimpleNamespace(name="m")
        form = Form(ModelText(TINY_PATH, 64), chat=True)
        asked = Asked(service, who, request, target, [1], SamplingParams(), "id", None, None, keep=False)
        body = ResponsesBody(model="m", input="hi")
        events = (
            chunks([asked], [form], 2, include_usage=False) if door == "chat" else _Stream(asked, form, body).events()
        )
        await EventStream(events)({"type": "http"}, receive, send)
        await asyncio.wait_for(journal.cancelled.wait(), 5)

    asyncio.run(go())


class Nobodys(Journal):
    """The journal of one sample whose model no generator has."""

    async def outcome(self, *_: Any) -> Any:
        await asyncio.sleep(0.01)
        return None if self.cancelled.is_set() else Waiting("paused_capacity", "no generator here", unserved=True)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_who_waits_for_a_model_that_no_generator_has_is_told_so(keep: bool, streamed: bool) -> None:
    """OpenAI's API cannot tell a client why it waits, so it saw nothing until its own timeout."""

    async def go() -> None:
        journal = Nobodys()

        async def follow(_request_id: str) -> Any:
            return SimpleNamespace(changed=asyncio.Event(), replaced=0, beyond=lambda _told: [])

        async def held(_org_id: str, waiting: Any, _otherwise: Any) -> Any:
            return await waiting

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        journal.streams = SimpleNamespace(follow=follow)  # type: ignore[attr-defined]
        polls = SimpleNamespace(hold=held, released=False)
        service: Any = SimpleNamespace(journal=journal, afterwards=Afterwards(), polls=polls)
        who: Any = SimpleNamespace(org_id="o")
        request: Any = SimpleNamespace(receive=receive)
        target: Any = SimpleNamespace(name="m")
        asked = Asked(service, who, request, target, [1], SamplingParams(), "id", None, None, keep=keep)
        if streamed:
            form = Form(ModelText(TINY_PATH, 64), chat=False)
            told = [part async for part in chunks([asked], [form], 1, include_usage=False)]
            assert [b'"code":"no_generator"' in part for part in told] == [True, False]
        else:
            with pytest.raises(Unserved, match="ask the operator for a generator that has it") as caught:
                await ended([asked])
            assert (caught.value.status, caught.value.headers) == (503, {"retry-after": "1"})
        if not keep:
            await asyncio.wait_for(journal.cancelled.wait(), 5)

    asyncio.run(go())


def test_who_leaves_while_a_sample_is_drawn_is_no_error_in_the_log() -> None:
    """asyncio logs the error of a task with a traceback if nobody has looked at it."""
    logged = list[Any]()

    async def go() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: logged.append(context))
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def drawn() -> None:
            gone.set()
            await asyncio.Event().wait()

        waited, left = SimpleNamespace(ended=drawn), list[bool]()
        asked: Any = SimpleNamespace(
            request=Request({"type": "http"}, receive), waited=waited, leave=lambda: left.append(True)
        )
        with pytest.raises(ClientDisconnect):
            await ended([asked, asked])
        assert left == [True, True]
        gc.collect()

    asyncio.run(go())
    assert logged == []
