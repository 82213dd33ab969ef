"""The HTTP application: routes, errors, and the parts that live as long as it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import UTC, datetime

from fastapi import FastAPI
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp

from api.console import install as console
from api.http import refusing
from api.http.auth import KeyCache
from api.http.direct import Direct
from api.http.pace import Pace
from api.http.requests import Requests
from api.routes.computing import batches, completions, custom_loss, futures, sampling, training
from api.routes.openai import chat, generate, listing, responses
from api.routes.paying import billing, money, payments
from api.routes.people import audit, invitations, keys, limits, members, projects
from api.routes.runs import health, listing as rest, metrics, notes, sessions, trace
from api.routes.server import hub, probes, sdk, service, tokenizers, weft
from api.routes.stored import checkpoints, copies, downloads, weights
from api.server import reference
from api.server.housekeeping import keep_house, write_noted
from api.server.workers.machines import EmbeddedMachines, Machines
from api.server.workers.nursery import Nursery
from api.state.rates import LocalRates, Rates
from api.state.service import OneAtATime, Service
from api.state.traffic import Traffic
from api.who.principal import Principal
from billing.money.alerts import read_gauges
from billing.prices import PriceList
from scheduler.jobs.catalogue import JOBS
from scheduler.jobs.embedded import EmbeddedJobs
from scheduler.jobs.registry import JobContext
from scheduler.reports.waiting import oldest_s
from store import logs
from store.blobs.contract import Blobs
from store.database.db import Database
from store.settings import Settings
from workers.model.card import ModelCard

log = logging.getLogger(__name__)

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

#: The routes of every operation, called directly (`api.http.direct`).
DIRECT = frozenset(
    (futures.retrieve_future, training.optim_step, batches.forward_backward, batches.forward, sampling.asample)
)


def create_app(
    settings: Settings, cards: dict[str, ModelCard], database: Database, blobs: Blobs, prices: PriceList
) -> FastAPI:
    """The whole service. `app.state` has `ready`, which waits until the workers are there, and `stopping`, to be called
    when a shutdown begins. It may be given a `nursery` of workers, which its owner closes, and a `metrics_socket`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nursery = getattr(app.state, "nursery", None)
        machines, rates = parts_of(settings, cards, database, blobs, prices, nursery)
        holder = Service(settings, cards, database, blobs, prices, machines.journal, machines.stats, rates=rates)

        def stopping() -> None:
            machines.drain()
            holder.polls.release()

        app.state.service = holder
        app.state.ready = machines.ready
        app.state.stopping = stopping
        machines.start()
        loops = [asyncio.create_task(work) for work in (keep_house(holder), app.state.traffic.watch_loop())]
        jobs = EmbeddedJobs(JobContext(database, blobs, settings, prices), JOBS)
        if settings.jobs.driver == "embedded":
            jobs.start()
        try:
            async with _metrics(app, settings, machines, database):
                yield
        finally:
            await run_in_threadpool(jobs.stop)
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await machines.stop()
            try:
                await write_noted(holder)
            except SQLAlchemyError as error:
                log.warning("what was noted since the last round of housekeeping is lost: %s", logs.in_a_line(error))

    return front(lifespan)


def _metrics(
    app: FastAPI, settings: Settings, machines: Machines, database: Database
) -> AbstractAsyncContextManager[int | None]:
    sock = getattr(app.state, "metrics_socket", None)
    if sock is None:
        return nullcontext()
    # Its library takes long to import, and most servers have no metrics port.
    from api.server.prometheus import Stored, metrics_server, render
    from api.server.vitals import vitals

    def stored() -> Stored | None:
        now = datetime.now(UTC)
        try:
            with database.read() as session:
                return Stored(read_gauges(session, now), oldest_s(session, now))
        except SQLAlchemyError as error:
            log.warning("/metrics without what the database knows: %s", error)
            return None

    async def known() -> tuple[Stored | None, dict[str, int]]:
        found = await run_in_threadpool(stored)
        return found, await machines.journal.queue_lengths() if found is not None else {}

    ask = OneAtATime(known)

    async def text() -> str:
        state = app.state
        try:
            found, queue = await ask()
        except (SQLAlchemyError, TimeoutError):
            found, queue = None, {}
        own = vitals(state.traffic, getattr(state, "gate", None), machines.processes(), settings.data_dir)
        return render(machines.journal.meters, {**machines.stats(), "queue": queue}, found, own)

    return metrics_server(sock, text)


def parts_of(
    settings: Settings,
    cards: dict[str, ModelCard],
    database: Database,
    blobs: Blobs,
    prices: PriceList,
    nursery: Nursery | None = None,
) -> tuple[Machines, Rates]:
    """The parts of the embedded service, or of one of several replicas."""
    if settings.redis_url:  # imported only with Redis
        from api.server.workers.shared_machines import SharedMachines
        from api.state.shared_rates import SharedRates

        return SharedMachines(settings, cards, database, blobs, prices), SharedRates(settings.redis_url)
    return EmbeddedMachines(settings, cards, database, blobs, prices, nursery), LocalRates()


class Front(FastAPI):
    """Records each request, lets it begin in its turn, and gives it to the direct routes before FastAPI."""

    def build_middleware_stack(self) -> ASGIApp:
        routers = (futures.router, training.router, batches.router, sampling.router)
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        direct = [route for route in routes if route.endpoint in DIRECT]
        called = Direct(super().build_middleware_stack(), direct, self.exception_handlers)
        return Requests(Pace(called, self._org_of), self.state.traffic)

    def _org_of(self, digest: str) -> str | None:
        known: Principal | None = self.state.keys.get(digest)
        return known.org_id if known is not None else None


def front(lifespan: Lifespan | None = None) -> FastAPI:
    """The routes alone. `app.state.service` must be set before the first request."""
    app = Front(
        title="Weft",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        # `Requests` records spans itself: FastAPI's would contain whole paths, and be looked up with each request.
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    app.state.keys = KeyCache()
    app.state.traffic = Traffic()
    refusing.install(app, console.astray)
    # Added as they are: `include_router` would build each route a second time, while the first clients wait.
    for routes in (  # searched in this order: the most used ones first
        futures,
        training,
        batches,
        sampling,
        completions,
        sessions,
        service,
        trace,
        audit,
        billing,
        custom_loss,
        weights,
        health,
        rest,
        checkpoints,
        copies,
        downloads,
        weft,
        tokenizers,
        hub,
        money,
        metrics,
        notes,
        payments,
        probes,
        keys,
        members,
        invitations,
        projects,
        limits,
        sdk,
    ):
        app.router.routes += routes.router.routes
    for router in (listing.router, listing.turns_router, chat.router, responses.router, generate.router):
        app.router.routes += router.routes
    app.router.routes += reference.router.routes
    console.install(app)
    return app
