"""Where a service keeps its state: the database, Redis and the object store; and whether their clocks and this
machine's agree."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Connection, Engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from api.doctor.findings import Finding, ok, warning, wrong
from api.doctor.machine import nearest
from api.server.serve import other_server
from migrations.upgrade import UnknownRevision, head, refuse_unknown, revision_of
from store.backup.databases import check_sqlite, is_empty, is_sqlite, opened
from store.backup.files import BadBackup
from store.database.commit_mark import CommitMark, LostCommits
from store.database.leaps import HEARTBEAT, settles_by
from store.database.row_security import SERVICE_ROLE, may_use
from store.logs import in_a_line
from store.settings import Settings, SettingsError
from store.tables import JobRun
from workers.model.tiny import TINY_NAME, TINY_PATH

#: Clocks may differ by at most this: leases last seconds.
SKEW_S = 2.0
#: The heartbeat job runs every 30 s.
SILENT = timedelta(minutes=3)


def database(settings: Settings) -> Iterator[Finding]:
    url = settings.effective_database_url
    try:
        if is_sqlite(url):
            yield from _sqlite(settings)
            return
        with opened(url, connect_args={"connect_timeout": 5}) as engine:
            yield _revision(engine, _postgres(engine))
    except (SQLAlchemyError, ImportError) as error:
        remedy = "look at database_url (WEFT_DATABASE_URL) and the server that it names"
        yield wrong("database", f"does not answer: {in_a_line(error)}", remedy)


def _sqlite(settings: Settings) -> Iterator[Finding]:
    url = settings.effective_database_url
    file = Path(make_url(url).database or "")
    try:
        mark = CommitMark.of(url)
        if mark is not None:
            mark.check()
        if is_empty(url):
            yield ok("database", f"{file} is not there yet: the first start makes it")
            return
        check_sqlite(file)
    except (LostCommits, BadBackup) as error:
        yield wrong("database", str(error), "weftd restore a backup into a new folder, or do as it says")
        return
    with opened(url) as engine:
        yield _revision(engine, f"{file.name} is whole")


def _postgres(engine: Engine) -> str:
    with engine.connect() as connection:
        return f"PostgreSQL {connection.scalar(text('SHOW server_version'))}"


def _revision(engine: Engine, says: str) -> Finding:
    found = revision_of(engine)
    try:
        refuse_unknown(found, "the database")
    except UnknownRevision as error:
        return wrong("database", str(error), "use the version of Weft that made it, or restore a backup")
    if found is None:
        return ok("database", f"{says}, without tables: the first start makes them")
    if found != head():
        remedy = "weftd backup, then weftd migrate or a start"
        return warning("database", f"{says}, at revision {found}; this weftd has {head()}", remedy)
    return ok("database", f"{says}, at revision {found}")


def login(settings: Settings) -> Iterator[Finding]:
    """Check, on PostgreSQL, that the server's login is a member of the role that sees all rows, and no superuser."""
    if is_sqlite(settings.effective_database_url):
        return
    role = {"role": SERVICE_ROLE}
    make = "CREATE ROLE weft_app NOLOGIN; CREATE ROLE weft_service NOLOGIN; GRANT weft_app, weft_service TO <login>"
    asked = text("SELECT rolsuper, rolcreaterole FROM pg_roles WHERE rolname = current_user")
    with _connected(settings) as connection:
        is_superuser, makes_roles = connection.execute(asked).one()
        is_there = connection.scalar(text("SELECT 1 FROM pg_roles WHERE rolname = :role"), role)
        is_member = is_there and may_use(connection, SERVICE_ROLE)
    if is_superuser:
        remedy = f"give weftd one of its own: {make}"
        yield warning("login", "is a superuser, whom row-level security does not bind", remedy)
    elif not is_member and not (makes_roles and not is_there):
        yield wrong("login", f"may not work as {SERVICE_ROLE}, and cannot make itself a member", make)
    else:
        yield ok("login", "is bound by row-level security")


def jobs(settings: Settings) -> Iterator[Finding]:
    """Check that jobs run while a service runs."""
    if not settings.redis_url and other_server(settings.data_dir) is None:
        return
    with _connected(settings) as connection:
        if revision_of(connection.engine) is None:
            return
        row = Session(connection).get(JobRun, HEARTBEAT)
    beat, now = row.succeeded_at if row else None, datetime.now(UTC)
    until = settles_by(row, now)
    if beat is None or now - beat > SILENT:
        remedy = "see `weftd jobs list`; with jobs.driver = celery: do `weftd jobs beat` and `weftd jobs worker` run?"
        yield warning("jobs", f"last heartbeat: {beat or 'never'}; nothing expires or is billed by the hour", remedy)
    elif until is not None:
        says = f"the clock leapt lately, or none ran: nothing expires or is closed before {until:%Y-%m-%d %H:%M} UTC"
        yield warning("jobs", says, "see that the time is right, or put it right until then (docs/jobs.md)")
    else:
        yield ok("jobs", "they run")


def blobs(settings: Settings) -> Iterator[Finding]:
    """Check that the object store answers and lets this key read."""
    if not settings.blob_url:
        return
    from store.blobs.bucket import Bucket

    try:
        is_used = Bucket(settings.blob_url).is_used()
    except SettingsError as error:
        yield wrong("blobs", str(error), 'set what it names; docs/production.md, "An object store"')
        return
    yield ok("blobs", settings.blob_url + (" answers" if is_used else " is empty: the first start begins it"))


def redis(settings: Settings) -> Iterator[Finding]:
    if not settings.redis_url:
        return
    from redis.exceptions import RedisError

    from scheduler.links.redis_clients import pooled

    try:
        with closing(pooled(settings.redis_url)) as client:
            facts = client.info()
        policy, version = facts.get("maxmemory_policy", ""), str(facts.get("redis_version", "0"))
    except RedisError as error:
        yield wrong("redis", f"does not answer: {error}", "look at redis_url (WEFT_REDIS_URL) and the Redis it names")
        return
    if int(version.partition(".")[0]) < 7:
        yield wrong("redis", f"is version {version}", "use Redis 7 or newer")
    elif facts.get("cluster_enabled"):
        yield wrong(
            "redis",
            "is a Redis Cluster, whose nodes each have a part of the keys",
            "use one Redis, or one with replicas",
        )
    elif policy != "noeviction":
        yield warning("redis", f"may forget keys (maxmemory-policy {policy})", "CONFIG SET maxmemory-policy noeviction")
    else:
        yield ok("redis", f"version {version}")


def workers(settings: Settings) -> Iterator[Finding]:
    """The workers that have come to Redis for each base model, or load it. Trainers come to the leading server, which
    reports them."""
    if not settings.redis_url:
        return
    from scheduler.links.contract import QueueUnreachable
    from scheduler.links.loading import LoadingBoard, longest
    from scheduler.links.redis_queue import RedisQueue

    with closing(LoadingBoard(settings.redis_url)) as board, closing(RedisQueue(settings.redis_url)) as queue:
        try:
            loading, served, strangers = board.there(), queue.served(), queue.strangers()
        except QueueUnreachable:  # reported by `redis`
            return
    for one in loading:
        yield ok("workers", f"{one.name} loads {', '.join(one.models)}, for {one.loading_s:.0f} s now")
    for worker in strangers:
        says = f"{worker} is of another version than this weftd: it gets no samples of servers of this one"
        yield warning("workers", says, "start servers and workers of one version (docs/operating.md)")
    for name in settings.models or {TINY_NAME: TINY_PATH}:
        if name in served:
            yield ok("workers", f"a generator has {name}")
        elif longest(loading, "generator", name) is None:
            yield warning("workers", f"no generator has or loads {name}", "start one: weftd worker generator")


def clocks(settings: Settings) -> Iterator[Finding]:
    """Check that clocks agree: leases and expiries use the clocks of the database, of Redis and of the file system."""
    apart = {name: apart_s(read) for name, read in _clocks(settings).items()}
    ahead = {name: off for name, off in apart.items() if abs(off) > SKEW_S}
    if ahead:
        says = ", ".join(f"that of {name} is {off:+.1f} s from this machine's" for name, off in ahead.items())
        yield wrong("clocks", says, "have all machines follow the same time (chrony, systemd-timesyncd)")
    else:
        yield ok("clocks", f"this machine's agrees with that of {', '.join(apart)}")


def _clocks(settings: Settings) -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {"the file system": lambda: _file_time(nearest(settings.data_dir))}
    if not is_sqlite(settings.effective_database_url):
        found["the database"] = lambda: _database_time(settings)
    if settings.redis_url:
        found["Redis"] = lambda: _redis_time(settings.redis_url)
    return found


def apart_s(read: Callable[[], float], grain_s: float = 0.0) -> float:
    """By how many seconds a clock is ahead, beyond the time of the question; its answers are rounded down to multiples
    of `grain_s`."""
    before = time.time()
    found = read()
    after = time.time()
    return min(found + grain_s - before, 0.0) or max(found - after, 0.0)


def _file_time(folder: Path) -> float:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()
        return os.fstat(file.fileno()).st_mtime


def _database_time(settings: Settings) -> float:
    with _connected(settings) as connection:
        return float(connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())")) or 0)


def _redis_time(url: str) -> float:
    from scheduler.links.redis_clients import pooled

    with closing(pooled(url)) as client:
        seconds, micros = client.time()
        return float(seconds) + float(micros) / 1e6


@contextmanager
def _connected(settings: Settings) -> Iterator[Connection]:
    with opened(settings.effective_database_url) as engine, engine.connect() as connection:
        yield connection
