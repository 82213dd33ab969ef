"""The HTTP application: routes, errors, and the parts that live as long as it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from api import errors
from api.console import install as console
from api.http.auth import KeyCache
from api.routes import (
    audit,
    batches,
    billing,
    checkpoints,
    completions,
    copies,
    custom_loss,
    downloads,
    futures,
    health,
    keys,
    limits,
    members,
    metrics,
    money,
    payments,
    probes,
    projects,
    rest,
    sampling,
    sdk,
    service,
    sessions,
    trace,
    training,
    weft,
    weights,
)
from api.routes.openai import chat, generate, listing, responses
from api.server import reference
from api.server.housekeeping import keep_house
from api.server.machines import EmbeddedMachines, Machines
from api.server.worker_process import WorkerProcess
from api.state.rates import LocalRates, Rates
from api.state.service import Service
from billing.alerts import MoneyGauges, read_gauges
from billing.prices import PriceList
from scheduler.jobs.catalogue import JOBS
from scheduler.jobs.embedded import EmbeddedJobs
from scheduler.jobs.registry import JobContext
from store.blobs import Blobs
from store.db import Database
from store.settings import Settings
from workers.model.card import ModelCard

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(
    settings: Settings, cards: dict[str, ModelCard], database: Database, blobs: Blobs, prices: PriceList
) -> FastAPI:
    """The whole service. `app.state` has `ready`, which waits until the workers are there, and `stopping`, to be called
    when a shutdown begins. It may be given `ahead`: worker processes that were started before it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ahead = getattr(app.state, "ahead", None)
        machines, rates = parts_of(settings, cards, database, blobs, prices, ahead)
        holder = Service(settings, cards, database, blobs, prices, machines.journal, machines.stats, rates=rates)

        def stopping() -> None:
            machines.drain()
            holder.polls.release()

        app.state.service = holder
        app.state.ready = machines.ready
        app.state.stopping = stopping
        machines.start()
        house = asyncio.create_task(keep_house(holder))
        jobs = EmbeddedJobs(JobContext(database, blobs, settings, prices), JOBS)
        if settings.jobs.driver == "embedded":
            jobs.start()
        try:
            async with _metrics(settings, machines, database):
                yield
        finally:
            await run_in_threadpool(jobs.stop)
            house.cancel()
            with suppress(asyncio.CancelledError):
                await house
            await machines.stop()
            await holder.liveness.flush()
            await holder.last_used.flush()
            await holder.fetched.flush()

    return front(lifespan)


def _metrics(settings: Settings, machines: Machines, database: Database) -> AbstractAsyncContextManager[int | None]:
    if not settings.metrics_port:
        return nullcontext()
    from api.server.prometheus import metrics_server, render  # its library takes a while, and most servers have no port

    def gauges() -> MoneyGauges:
        with database.read() as session:
            return read_gauges(session, datetime.now(UTC))

    async def text() -> str:
        money = await run_in_threadpool(gauges)
        return render(machines.journal.meters, machines.stats(), money)

    return metrics_server(settings.host, settings.metrics_port, text)


def parts_of(
    settings: Settings,
    cards: dict[str, ModelCard],
    database: Database,
    blobs: Blobs,
    prices: PriceList,
    ahead: dict[str, WorkerProcess] | None = None,
) -> tuple[Machines, Rates]:
    """Those of the embedded service, or those of one replica of several."""
    if settings.redis_url:  # imported here, with Redis
        from api.server.shared_machines import SharedMachines
        from api.state.shared_rates import SharedRates

        return SharedMachines(settings, cards, database, blobs, prices), SharedRates(settings.redis_url)
    return EmbeddedMachines(settings, cards, database, blobs, prices, ahead), LocalRates()


def front(lifespan: Lifespan | None = None) -> FastAPI:
    """The routes alone; `app.state.service` must be there before the first request."""
    app = FastAPI(
        title="Weft", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.keys = KeyCache()
    errors.install(app)
    for routes in (
        service,
        sessions,
        trace,
        audit,
        billing,
        training,
        batches,
        custom_loss,
        weights,
        sampling,
        futures,
        health,
        completions,
        rest,
        checkpoints,
        copies,
        downloads,
        weft,
        money,
        metrics,
        payments,
        probes,
        keys,
        members,
        projects,
        limits,
        sdk,
    ):
        app.include_router(routes.router)
    for router in (listing.router, listing.turns_router, chat.router, responses.router, generate.router):
        app.include_router(router)
    app.include_router(reference.router)
    console.install(app)
    return app
