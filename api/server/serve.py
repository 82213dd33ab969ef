"""One server on one data folder: locked, bound, served until a signal, and drained.

What goes wrong before the server answers is a `CannotServe` with one line for the operator. Little is imported here:
what takes long to import comes after the address and the workers, which need not wait for it.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from api.server.workers.memory_plan import planned
from api.server.workers.nursery import Nursery
from api.server.workers.worker_process import WorkerProgram
from api.server.workers.worker_programs import embedded_workers, new_nursery
from billing.prices import PriceList, load_prices
from store import logs, tracing
from store.blobs.contract import StoreAway
from store.blobs.room import NoRoom, Room, may_pass
from store.people.oidc_settings import OidcError, OidcSettings, client_secret
from store.settings import Settings, SettingsError, Unreachable
from workers.model.card import ModelCard, read_card
from workers.model.planning.plan import DoesNotFit
from workers.model.tiny import TINY_NAME, TINY_PATH

if TYPE_CHECKING:
    from store.database.db import Database

log = logging.getLogger(__name__)

#: How many connections may wait to be accepted, as during a start.
BACKLOG = 4096
#: After how many new objects Python looks for reference circles among them. With Python's default of 700, objects of
#: requests under way are looked through again and again: a fourteenth of the time of an operation.
GC_OBJECTS = 10_000
#: How long a computing thread keeps the interpreter from other threads. The event loop gives it up at every system
#: call, a hundred times for an answer of 6 MB, and with Python's default of 5 ms it would wait that long each time.
SWITCH_S = 0.0005


class CannotServe(RuntimeError):
    """The server cannot start."""

    exit_code = 2


class Away(CannotServe):
    """It cannot start now: what it needs is away, in use or full, and may not be later."""

    exit_code = 1


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds, whose text is for the operator, as CannotServe."""
    try:
        yield
    except kinds as error:
        raise (Away if isinstance(error, Unreachable | StoreAway) else CannotServe)(str(error)) from None


@refusing(SettingsError, tracing.TracingError, DoesNotFit)
def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0 after a graceful drain.

    Whatever takes long is begun first. The port listens at once, so that the kernel keeps early clients waiting instead
    of refusing them; and the first worker imports torch while this process still imports its own modules. The other
    workers follow later: on two cores they would only slow down both.
    """
    tracing.configure("weft-api")
    prices = load_prices(settings.prices)
    if settings.payments.enabled:
        from billing.payments.client import stripe_secrets

        stripe_secrets(settings.payments)
    check_oidc(settings.oidc)
    check_store(settings)
    cards = read_cards(settings.models)
    if unnamed := prices.unnamed(settings.models, datetime.now(UTC)):
        log.warning("%s", unnamed)
    alone = nullcontext() if settings.redis_url else only_one(settings.data_dir)
    metrics = listening(settings.host, settings.metrics_port) if settings.metrics_port else nullcontext()
    with alone, listening(settings.host, settings.port) as sock, metrics as metrics_sock:
        tables: list[str] = []
        if not settings.redis_url:
            note_address(settings.data_dir, _url(settings.host, sock))
            settings, tables = planned(settings, cards)
        paths = {name: card.path for name, card in cards.items()}
        programs = [] if settings.redis_url else embedded_workers(settings, paths)
        with _nursery(programs) as nursery:
            return _serve(settings, cards, prices, sock, metrics_sock, nursery, tables)


def _serve(
    settings: Settings,
    cards: dict[str, ModelCard],
    prices: PriceList,
    sock: socket.socket,
    metrics_sock: socket.socket | None,
    nursery: Nursery | None,
    tables: Sequence[str],
) -> int:
    gc.disable()  # imported objects stay: looking through them again and again takes a tenth of the time
    from sqlalchemy.exc import SQLAlchemyError

    from api.server.app import create_app
    from api.server.listener import Server
    from billing.metering.charges import check_prices
    from billing.money.wallets import set_default
    from store.blobs.opening import blobs_of

    gc.freeze()
    gc.enable()
    gc.set_threshold(GC_OBJECTS, 20)
    sys.setswitchinterval(SWITCH_S)
    database = open_database(settings)
    try:
        try:
            database.write_now(lambda session: set_default(session, settings.billing))
            with database.read() as session:
                check_prices(session, prices)
            claim_store(settings, database)
        except SQLAlchemyError as error:
            raise _unusable(settings, error) from None
        blobs = blobs_of(settings)
        with suppress(NoRoom):
            Room(blobs.root).check()  # logs it, and the first request would be refused
        if not settings.redis_url:
            blobs.clear_unfinished()
            shutil.rmtree(settings.data_dir / "pages", ignore_errors=True)  # pages of trainers that are gone
        app = create_app(settings, cards, database, blobs, prices)
        app.state.nursery, app.state.metrics_socket = nursery, metrics_sock
        for table in tables:
            log.info("the plan of memory (docs/operating.md):\n%s", table)
        server = Server(app, _url(settings.host, sock), BACKLOG, settings.front)
        code = server.run_until_signal(sock)
        if server.failure is not None:
            raise Away(str(server.failure))  # killed for want of memory, perhaps
        return code
    finally:
        database.close()
        tracing.stop()


def check_oidc(settings: OidcSettings) -> None:
    """Raises CannotServe if the settings for sign-in cannot be used. The provider is asked when somebody comes."""
    if not settings.on:
        return
    if find_spec("authlib") is None:
        raise CannotServe("oidc: the packages that it needs are not installed: pip install 'weft-tuning-server[oidc]'")
    try:
        client_secret(settings)
    except OidcError as error:
        raise CannotServe(f"oidc: {error}") from None


def check_store(settings: Settings) -> None:
    """Raises CannotServe if the object store of the settings cannot be used, or not by several."""
    from store.blobs.opening import check_blobs

    if settings.blob_url and settings.redis_url and settings.server_secret is None:
        raise CannotServe(
            "server_secret: replicas that share no folder need one secret for the links and tokens that they sign: set "
            "WEFT_SERVER_SECRET to the same for all, for example to what `openssl rand -hex 32` prints"
        )
    with refusing(SettingsError):
        check_blobs(settings)


def claim_store(settings: Settings, database: Database) -> None:
    """Raises CannotServe if the prefix of the object store is another service's."""
    from store.blobs.owner import claim_prefix

    with refusing(SettingsError, OSError):
        claim_prefix(settings, database)


def read_cards(models: Mapping[str, Path]) -> dict[str, ModelCard]:
    """The cards of the models to serve; of the built-in model if none is named."""
    with refusing(OSError, ValueError):  # UnsupportedModel is one
        return {name: read_card(name, path) for name, path in (models or {TINY_NAME: TINY_PATH}).items()}


def _unusable_folder(data_dir: Path, error: OSError) -> CannotServe:
    remedy = "name a folder that weftd may make and write to, on a disk with room"
    kind = Away if may_pass(error) else CannotServe
    return kind(f"cannot use the data folder {data_dir}: {error.strerror}: {remedy}")


def _unusable(settings: Settings, error: Exception) -> CannotServe:
    if isinstance(error, OSError) and error.filename and error.errno != errno.ENOSPC:
        return _unusable_folder(settings.data_dir, error)
    from sqlalchemy.exc import OperationalError

    reason = logs.in_a_line(error)
    if settings.database_url:
        server = not settings.database_url.startswith("sqlite")
        kind = Away if server and isinstance(error, OperationalError) else CannotServe
        return kind(f"cannot use the database that database_url (WEFT_DATABASE_URL) names: {reason}")
    kind = CannotServe
    with suppress(OSError):
        if shutil.disk_usage(settings.data_dir).free < 1 << 20:  # with a full disk SQLite may only say "disk I/O error"
            kind, reason = Away, reason + "; the disk of this folder is full: make room"
    if "not a database" in reason or "malformed" in reason:
        reason += '; put the right weft.db back, or restore a backup into a new folder (docs/operating.md, "Damage")'
    return kind(f"cannot use the database of {settings.data_dir}: {reason}")


def open_database(settings: Settings) -> Database:
    """The database of the settings, with its tables up to date."""
    import sqlite3

    from sqlalchemy.exc import SQLAlchemyError

    from migrations.upgrade import CannotMigrate, InUse, migrate
    from store.backup.databases import is_empty
    from store.backup.files import RESTORING
    from store.database.commit_mark import LostCommits
    from store.database.db import Database

    database, url = None, settings.effective_database_url
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        # a new service would delete the files of this interrupted restore
        if (settings.data_dir / RESTORING).exists() and is_empty(url):
            raise CannotServe(
                f"a restore into {settings.data_dir} was cut off: delete it, and restore the backup again"
            )
        database = Database(url, durable=settings.durable)
        migrate(database, partial(other_server, settings.data_dir))
    except (LostCommits, CannotMigrate) as error:
        if database is not None:
            database.close()
        raise (Away if isinstance(error, InUse) else CannotServe)(str(error)) from None
    except (OSError, SQLAlchemyError, sqlite3.Error, ImportError) as error:
        if database is not None:
            database.close()
        raise _unusable(settings, error) from None
    return database


@contextmanager
def only_one(data_dir: Path) -> Iterator[None]:
    """Lock the data folder for one server: journal and blobs have one owner. The kernel releases the lock with the
    process, however it ends. A folder that was created here and stays empty is removed again."""
    made = not data_dir.exists()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(data_dir / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _unusable_folder(data_dir, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        except BlockingIOError:
            owner = _noted(descriptor)[0] or "unknown"
            says = (
                f"another weftd (process {owner}) serves the data folder {data_dir}: end that, or name another folder"
            )
            raise CannotServe(says) from None
        except OSError as error:
            raise _unusable_folder(data_dir, error) from None
        try:
            yield
        finally:
            with suppress(OSError):
                if made and os.listdir(data_dir) == ["server.lock"]:
                    shutil.rmtree(data_dir)
    finally:
        os.close(descriptor)


def note_address(data_dir: Path, url: str) -> None:
    """Write where this process, which has the lock, is reached."""
    with suppress(OSError):  # no room: the address is only for who asks `server_at`
        (data_dir / "server.lock").write_text(f"{os.getpid()} {url}")


def other_server(data_dir: Path) -> str | None:
    """The process that holds the lock of a data folder (`only_one`), unless it is this one."""
    holder = _holder(data_dir)
    return holder[0] if holder is not None and holder[0] != str(os.getpid()) else None


def server_at(data_dir: Path) -> str | None:
    """The address of the server that holds the lock of a data folder."""
    holder = _holder(data_dir)
    return (holder[2] or None) if holder is not None else None


def _holder(data_dir: Path) -> tuple[str, str, str] | None:
    try:
        descriptor = os.open(data_dir / "server.lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _noted(descriptor)
    finally:
        os.close(descriptor)


def _noted(descriptor: int) -> tuple[str, str, str]:
    """What a lock says: the process, a space, and the address."""
    return os.read(descriptor, 512).decode().partition(" ")


@contextmanager
def _nursery(programs: Sequence[WorkerProgram]) -> Iterator[Nursery | None]:
    """A nursery that already imports what the workers need, beside the rest of the start. None on macOS, whose own
    libraries do not survive a fork."""
    if sys.platform != "linux" or not any(program.forked for program in programs):
        yield None
        return
    nursery = new_nursery()
    try:
        with suppress(OSError):  # the first fork tries again
            nursery.ahead()
        yield nursery
    finally:
        nursery.close()


#: What to do, by why a socket cannot be bound.
_INSTEAD = {
    errno.EADDRINUSE: "; end what listens there, or take another port",
    errno.EADDRNOTAVAIL: "; host is an address of this machine, or 0.0.0.0 for all of them",
    errno.EACCES: "; take a port above 1023",
}
#: Keep-alive: a client whose machine or network is gone closes nothing. It is probed after 30 s of silence, and given
#: up 30 s later.
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket at the address; connections wait until somebody accepts them."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotServe(f"cannot use the address {host}: {error.strerror}{_INSTEAD[errno.EADDRNOTAVAIL]}") from None
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted connections inherit it
        for option, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError as error:
            instead = _INSTEAD.get(error.errno or 0, "")
            raise CannotServe(f"cannot listen on {host} port {port}: {error.strerror}{instead}") from None
        yield sock


def _url(host: str, sock: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
