"""A client that leaves a stream stops its sample, however little of the answer it has taken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message
from weft.wire import SamplingParams

from api.http.events import EventStream
from api.routes.openai.answers import Form
from api.routes.openai.asking import Asked
from api.routes.openai.bodies import ResponsesBody
from api.routes.openai.chunks import chunks
from api.routes.openai.responses import _Stream
from api.routes.openai.text import ModelText
from api.state.afterwards import Afterwards
from workers.model.tiny import TINY_PATH


class Journal:
    """Of one sample, which goes on until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def cancel(self, _org_id: str, _request_id: str) -> bool:
        self.cancelled.set()
        return True

    async def outcome(self, *_: Any) -> None:
        return None  # it is gone


@pytest.mark.parametrize("door", ["chat", "responses"])
@pytest.mark.parametrize("taken", [0, 1])
def test_before_the_first_token(door: str, taken: int) -> None:
    """Its first words lie in a full buffer when the client goes."""

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
        events = chunks(asked, form, 2, include_usage=False) if door == "chat" else _Stream(asked, form, body).events()
        await EventStream(events)({"type": "http"}, receive, send)
        await asyncio.wait_for(journal.cancelled.wait(), 5)

    asyncio.run(go())
