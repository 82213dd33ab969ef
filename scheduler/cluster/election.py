"""Elects the replica that leads: every replica tries, and the lease in the database (`scheduler.cluster.fence`)
decides."""

from __future__ import annotations

import asyncio
import logging
import uuid

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from scheduler.cluster import fence
from scheduler.cluster.term import BEAT_S, Shared, Term
from store import logs
from store.database.clock import clock

log = logging.getLogger(__name__)


class Leadership:
    """Stands for election for as long as the server runs."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.term: Term | None = None
        self._elections: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._elections = asyncio.create_task(self._stand())

    async def stop(self, drain_s: float) -> None:
        """Give up leading, once the passes that run have ended, so that another replica can lead."""
        if self._elections is not None:
            self._elections.cancel()
            await asyncio.gather(self._elections, return_exceptions=True)
        term = self.term
        if term is None:
            return
        renewals = asyncio.create_task(self._renew_until_over(term))
        try:
            term.drain()
            await term.drained(drain_s)
        finally:
            renewals.cancel()
        await self._end(term)
        token = term.token
        try:
            await self._shared.database.write(lambda session: fence.give_up(session, token, clock(session)))
        except SQLAlchemyError as error:
            log.warning("the lease is left to its end: %s", logs.in_a_line(error))

    async def _stand(self) -> None:
        while True:
            token = uuid.uuid4().hex
            try:
                if await self._take(token):
                    await self._serve(Term(self._shared, token))
            except Exception:
                log.exception("cannot tell who leads; asking again")
            await asyncio.sleep(BEAT_S)

    async def _serve(self, term: Term) -> None:
        log.info("this replica leads")
        self.term = term
        # renewed also while the term still takes up the runs
        renewals = asyncio.create_task(self._renew_until_over(term))
        try:
            await term.begin()
            await renewals
        except Exception:
            renewals.cancel()
            await self._end(term)
            raise
        finally:
            renewals.cancel()
        log.warning("another replica leads")
        await self._end(term)

    async def _end(self, term: Term) -> None:
        self.term = None
        await term.end()

    async def _renew_until_over(self, term: Term) -> None:
        """Renew the lease until another replica has it. While the database does not answer nobody can have it: nothing
        can be written."""
        while not term.over.is_set():
            try:
                if not await self._take(term.token):
                    return
                term.renewed()
            except Exception:
                log.exception("the lease could not be renewed; trying again")
            await asyncio.sleep(BEAT_S)

    async def _take(self, token: str) -> bool:
        def write(session: Session) -> bool:
            return fence.take(session, token, clock(session))

        return await self._shared.database.write(write)
