"""One server on one data folder: locked, bound, served until a signal, and drained.

What goes wrong before the server answers is a `CannotServe` with one line for the operator.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from api.supervisor import Supervisor, WorkerFailed, embedded_workers
from billing.prices import load_prices
from billing.wallets import set_default
from store.blobs import Blobs
from store.commit_mark import LostCommits
from store.db import Database
from store.settings import PaymentsSettings, Settings, SettingsError
from workers.model.card import ModelCard, UnsupportedModel, read_card
from workers.model.tiny import TINY_NAME, TINY_PATH

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

#: Requests that are being answered when a signal comes have this long; long polls are answered at once.
FINISH_REQUESTS_S = 5
_MAX_HEADERS_BYTES = 64 * 1024


class CannotServe(RuntimeError):
    """The server cannot start."""


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0 after a graceful drain."""
    from api.app import create_app

    prices = load_prices(settings.prices)
    if settings.payments.enabled:
        check_payments(settings.payments)
    cards = read_cards(settings.models)
    if not settings.redis_url:
        check_workers(settings, cards)
    alone = nullcontext() if settings.redis_url else only_one(settings.data_dir)
    with alone, _bound(settings.host, settings.port) as sock:
        database = open_database(settings)
        try:
            database.write_now(lambda session: set_default(session, settings.billing))
            blobs = Blobs(settings.blobs_dir, durable=settings.durable)
            if not settings.redis_url:
                blobs.clear_unfinished()
            app = create_app(settings, cards, database, blobs, prices)
            server = _Server(app, _url(settings.host, sock))
            return server.run_until_signal(sock)
        finally:
            database.close()


def check_payments(settings: PaymentsSettings) -> None:
    from billing.payments.secrets import stripe_secrets

    try:
        stripe_secrets(settings)
    except SettingsError as error:
        raise CannotServe(str(error)) from None


def read_cards(models: Mapping[str, Path]) -> dict[str, ModelCard]:
    """The cards of the models to serve, or of the built-in one when none is named."""
    try:
        return {name: read_card(name, path) for name, path in (models or {TINY_NAME: TINY_PATH}).items()}
    except UnsupportedModel as error:
        raise CannotServe(str(error)) from None


def check_workers(settings: Settings, cards: Mapping[str, ModelCard]) -> None:
    """Raises CannotServe when the worker processes that the settings ask for cannot be started here."""
    try:
        embedded_workers(settings, {name: card.path for name, card in cards.items()})
    except SettingsError as error:
        raise CannotServe(str(error)) from None


def open_database(settings: Settings) -> Database:
    """The database of the settings, with its tables up to date."""
    database = None
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        database = Database(settings.effective_database_url, durable=settings.durable)
        database.migrate()
    except LostCommits as error:
        if database is not None:
            database.close()
        raise CannotServe(str(error)) from None
    except (OSError, SQLAlchemyError, ImportError) as error:
        if database is not None:
            database.close()
        reason = str(getattr(error, "orig", error)).splitlines()[0]
        raise CannotServe(f"cannot use the database of {settings.data_dir}: {reason}") from None
    return database


@contextmanager
def only_one(data_dir: Path) -> Iterator[None]:
    """Only one server may use a data folder: the journal and the blobs have one owner. The kernel frees the lock with
    the process, however it ends."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(data_dir / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise CannotServe(f"cannot use the data folder {data_dir}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 20).decode() or "unknown"
            raise CannotServe(f"another weftd (process {owner}) serves the data folder {data_dir}") from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound to the address, not listening yet: it is taken before anything slow starts."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotServe(f"cannot use the address {host}: {error.strerror}") from None
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise CannotServe(f"cannot listen on {host} port {port}: {error.strerror}") from None
        yield sock


def _url(host: str, sock: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"


class _Server(uvicorn.Server):
    """Uvicorn that says when it is ready, has the app drain first, and exits with 0 after a signal.

    The app keeps in its state `supervisor`, and optionally `stopping`, called when the drain begins (to answer long
    polls)."""

    def __init__(self, app: FastAPI, url: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                server_header=False,
                lifespan="on",
                backlog=4096,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=FINISH_REQUESTS_S,
                h11_max_incomplete_event_size=_MAX_HEADERS_BYTES,
            )
        )
        self._app = app
        self._url = url
        self._ready: asyncio.Task[None] | None = None
        self._failure: WorkerFailed | None = None

    def run_until_signal(self, sock: socket.socket) -> int:
        # Uvicorn raises a signal again once it has shut down; by then it must not kill the process.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        with suppress(SystemExit):  # the app could not start: uvicorn has logged why
            self.run(sockets=[sock])
        if self._failure is not None:
            raise CannotServe(str(self._failure))
        return 0 if self.started else 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._ready = asyncio.create_task(self._say_when_ready())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("draining")
        if self._ready is not None:
            self._ready.cancel()
        if stopping := getattr(self._app.state, "stopping", None):
            stopping()
        await super().shutdown(sockets=sockets)

    async def _say_when_ready(self) -> None:
        supervisor: Supervisor = self._app.state.supervisor
        try:
            await supervisor.wait_attached()
        except WorkerFailed as error:
            self._failure = error
            self.should_exit = True
        else:
            print(f"ready {self._url}", flush=True)
