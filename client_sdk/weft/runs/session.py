"""A session with the server: made when first needed, kept alive by heartbeats, finished once.

Everything a `ServiceClient` makes shares its session: the connections, the configuration, and the counters that number
runs and samplers within it. All coroutines here run on the background loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping
from typing import Protocol

from weft.errors import APIStatusError, WeftError
from weft.future import outlasting
from weft.transport.http import Call, Transport, encode
from weft.version import __version__
from weft.wire.service import (
    ClientConfigRequest,
    ClientConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    FinishReason,
    FinishSessionRequest,
    FinishType,
    SessionHeartbeatRequest,
)
from weft.wire.shown import arguments

log = logging.getLogger("weft")

HEARTBEAT_S = 10.0
CLOSED = "this ServiceClient is closed"
#: Samples in flight per session; each holds a poll.
MAX_SAMPLES = 500


class Flushing(Protocol):
    async def flush(self) -> None: ...


class Session:
    """One session of one `ServiceClient`."""

    def __init__(
        self,
        transport: Transport,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> None:
        self.transport = transport
        self.config = ClientConfigResponse()
        self.model_numbers = itertools.count()
        self.sampler_numbers = itertools.count()
        self.loss_numbers = itertools.count()
        self.sample_slots = asyncio.Semaphore(MAX_SAMPLES)
        with arguments():
            self._request = CreateSessionRequest(
                tags=[tag for tag in os.environ.get("WEFT_TAGS", os.environ.get("TINKER_TAGS", "")).split(",") if tag],
                user_metadata=dict(user_metadata or {}),
                sdk_version=__version__,
                project_id=project_id,
                display_name=display_name,
            )
        self._opening: asyncio.Task[str] | None = None
        self._heart: asyncio.Task[None] | None = None
        self._finished = False
        self._finishing: asyncio.Task[None] | None = None
        #: work to be sent before the session ends, and whether its end has begun
        self.closing: list[Flushing] = []
        self.ending = asyncio.Event()

    async def id(self) -> str:
        """The session's id; opens it at the first call. A failed opening is tried afresh at the next call."""
        self.transport.check_process()  # in a fork the wait for `_opening`, of the parent's loop, would never end
        if self._finished:
            raise WeftError(CLOSED)
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.ensure_future(self._open())
        try:
            return await outlasting(self._opening)
        except asyncio.CancelledError:
            if self._opening.cancelled():
                raise WeftError(CLOSED) from None
            raise

    async def _configure(self) -> None:
        body = ClientConfigRequest(sdk_version=__version__).model_dump_json().encode()
        self.config = await self.transport.ask("POST", "/client/config", ClientConfigResponse, body, with_key=True)
        self.transport.use_tokens = self.config.pjwt_auth_enabled

    async def _open(self) -> str:
        await self._configure()
        made = await self.transport.ask("POST", "/create_session", CreateSessionResponse, encode(self._request.body()))
        for level, message in (
            (logging.INFO, made.info_message),
            (logging.WARNING, made.warning_message),
            (logging.ERROR, made.error_message),
        ):
            if message:
                log.log(level, "%s", message)
        self._heart = asyncio.ensure_future(self._beat(made.session_id))
        return made.session_id

    async def _beat(self, session_id: str) -> None:
        """Tell the server that we are here, until it says that the session is over (410)."""
        body = SessionHeartbeatRequest(session_id=session_id).model_dump_json().encode()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self.transport.post_once("/session_heartbeat", body)
            except APIStatusError as error:
                if error.status_code == 410:
                    log.warning("the server has ended session %s", session_id)
                    return
                log.debug("heartbeat: %s", error)
            except WeftError as error:
                log.debug("heartbeat: %s", error)

    async def _stop(self) -> None:
        """Send what waits to be sent, then stop the heartbeat."""
        self.ending.set()
        await asyncio.gather(*(waiting.flush() for waiting in self.closing))
        if self._heart is not None:
            self._heart.cancel()

    async def finish(self, status: FinishType, detail: str | None) -> None:
        """End the session, if it was ever opened, and close idle connections. Only the first call counts; others wait
        until it is done."""
        self._finished = True
        if self._finishing is None:
            self._finishing = asyncio.ensure_future(self._finish(status, detail))
        await outlasting(self._finishing)

    async def _finish(self, status: FinishType, detail: str | None) -> None:
        await self._stop()
        opening = self._opening
        # a session still being opened would start its heartbeat later, and nothing would stop it
        if opening is not None and not opening.cancel() and opening.exception() is None:
            body = encode(FinishSessionRequest(reason=FinishReason(type=status), detail=detail).body())
            await self.transport.send(Call("POST", f"/sessions/{opening.result()}/finish", body))
        await self.transport.close_idle()


class JoinedSession(Session):
    """A session that another client opened and will finish; here it is only kept alive."""

    def __init__(self, transport: Transport, session_id: str) -> None:
        super().__init__(transport)
        self._joined = session_id

    async def _open(self) -> str:
        await self._configure()
        self._heart = asyncio.ensure_future(self._beat(self._joined))
        return self._joined

    async def _finish(self, status: FinishType, detail: str | None) -> None:
        """Stop keeping the session alive; its owner ends it."""
        await self._stop()
