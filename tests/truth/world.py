"""The whole service in one process and one event loop, of real parts: database, blobs, routes, journal, desks, trainer
and generator. Links are in memory, processes are tasks and strands, and a schedule says when which of them dies.

A server that dies loses all that it has in memory, wherever each of its requests is just then; the next one recovers
from what is on the disk. A worker that dies loses what it holds; the supervisor starts another.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import orjson
import torch
from sqlalchemy.exc import OperationalError

from api.http.auth import KeyCache
from api.server.app import front
from api.state.service import Service
from billing.prices import load_prices
from migrations.upgrade import migrate
from scheduler.dispatch.sample_desk import SampleDesk
from scheduler.dispatch.trainer_desk import TrainerDesk
from scheduler.journal.journal import Journal
from scheduler.journal.recovery import recover
from scheduler.links.configs import TrainerBounds
from scheduler.links.messages import Occupancy, RunSpec
from store.blobs.room import Room
from store.database.db import Database
from store.settings import Limits, Settings, TrainerSettings
from tests.keys import create_key
from tests.truth import programs, ranks
from tests.truth.clock import Loop
from tests.truth.programs import ALPHA, CONTEXT, ORGANISATIONS
from tests.truth.rank import Memory
from tests.truth.schedules import RANKS, ROLES, SLICE_TOKENS, Role, Schedule, Seams
from tests.truth.seams import Life, LivingBlobs, LivingDatabase
from tests.truth.strand import Killed, Strand
from tests.workers.model.models import ours, reference
from workers.generator.torch_engine import TorchEngine
from workers.generator.worker import DISK_AGAIN_S, Generator
from workers.model.card import ModelCard
from workers.model.isolation import probe
from workers.trainer.process import StopFlag, serve
from workers.trainer.runs.state import kind_of
from workers.trainer.trainer import Trainer

MODEL = "weft/random-moe"
EOS = (7,)

#: The server that a task belongs to.
_LIFE: ContextVar[Life | None] = ContextVar("life", default=None)


#: How long the official SDK's clients wait for an answer.
PATIENCE_S = 60.0


class ServerLost(ConnectionError):
    """The connection broke, or no server listens."""


class Ground:
    """The common basis of all worlds: the model, and an empty database to copy. Made once, in `folder`."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder, self.isolation = folder, folder / "isolation"
        for each in (folder, self.isolation, folder / "base"):
            each.mkdir(parents=True, exist_ok=True)
        self.reference = reference("moe")
        self.for_training, self.for_sampling = (ours(self.reference, folder / name) for name in ("t", "g"))
        for decoder in (self.for_training, self.for_sampling):
            probe(decoder)
        self.card = ModelCard(MODEL, folder / "t", self.for_training.config, EOS)
        assert (self.card.vocab_size, self.card.context_length) == (programs.VOCAB, CONTEXT)
        self.prices = load_prices()
        self.empty = folder / "empty.db"
        database = Database(f"sqlite:///{self.empty}")
        migrate(database)
        self.keys = {name: database.write_now(lambda session, n=name: create_key(session, n)) for name in ORGANISATIONS}
        database.close()

    @cached_property
    def app(self) -> Any:
        """The app with its routes; all that they keep is in the state that each `Server` gives it."""
        return front()

    def run_bytes(self) -> int:
        """The bytes that a run of rank 4 takes of the trainer's memory."""
        spec = RunSpec("", MODEL, 4, ALPHA, 0, True, True, True)
        return kind_of(spec, self.for_training.config).size_bytes


@dataclass
class Reply:
    status: int
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)


class Link:
    """The server's end of a worker's link (`scheduler.links.sockets.Link`)."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, message: msgspec.Struct) -> None:
        life = self._worker.server_life
        with life.seam("message"):
            self._worker.deliver(message)

    def receive(self, message: Any) -> None:
        self._inbox.put_nowait(message)

    async def messages(self) -> AsyncIterator[Any]:
        while (message := await self._inbox.get()) is not None:
            yield message

    def hang_up(self) -> None:
        self._inbox.put_nowait(None)

    def close(self) -> None:
        self._inbox.put_nowait(None)


class Worker:
    """One life of a trainer or a generator, attached to one server."""

    def __init__(self, world: World, role: Role, server_life: Life) -> None:
        self.role, self.server_life = role, server_life
        body = world.trainer_body if role == "trainer" else world.generator_body
        self._strand = Strand(lambda strand: body(strand, self.life))
        self.life = Life(role, world.seams, world.loop, lambda: None, self._strand.wait)
        self.link = Link(self)
        self._world = world
        self._mail = asyncio.Event()
        self._doomed = False

    def deliver(self, message: msgspec.Struct) -> None:
        """Deliver a message of the server's; the worker may die just before or after it sees the message."""
        if self._doomed:
            return
        try:
            with self.life.seam("message"):
                self._strand.give(message)
        except Killed:
            self._doomed = True
        self._mail.set()

    def hang_up(self) -> None:
        self._strand.hang_up()
        self._mail.set()

    async def _waits(self, patience_s: float | None) -> None:
        """Wait for a message. A worker that only looks whether it is to stop is not woken to do so: it would look for
        ever, and nobody would ever be found to be stuck."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._mail.wait(), patience_s if patience_s == DISK_AGAIN_S else None)
        self._mail.clear()

    async def run(self) -> None:
        """Run until it dies, or its server has died."""
        try:
            while not self._doomed:
                stop = self._strand.resume()
                if stop == "over":
                    self._world.note(self._strand.error)
                    return
                if stop == "sent":
                    self._hand_over(self._strand.sent)
                    await self._world.breathe()
                elif stop == "looks":
                    await asyncio.sleep(0)
                elif stop == "slow":
                    await asyncio.sleep(self._strand.patience_s or 0.0)
                else:
                    await self._waits(self._strand.patience_s)
        except Killed:
            return
        finally:
            self.life.alive = False
            self._strand.kill()
            self.link.close()

    def _hand_over(self, message: Any) -> None:
        if isinstance(message, Occupancy):
            self.link.receive(message)  # when it comes depends on time, so it is no seam
            return
        with self.life.seam("message"):
            if self.server_life.alive:
                with suppress(Killed), self.server_life.seam("message"):
                    self.link.receive(message)


class Server:
    """One life of the server."""

    def __init__(self, world: World) -> None:
        self.life = Life("server", world.seams, world.loop, self._killed, world.loop.be_late)
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in the order in which they were made
        self.world = world
        self.database = LivingDatabase(f"sqlite:///{world.folder / 'weft.db'}", self.life, world.loop)
        self.journal: Any = None

    def start(self) -> None:
        world, schedule = self.world, self.world.schedule
        assert self.database._mark is not None
        self.database._mark.check()
        blobs = LivingBlobs(world.folder / "blobs", self.life)
        blobs.clear_unfinished()
        room = Room(world.folder, clock=world.loop.time)
        self.journal = Journal(self.database, blobs, world.ground.prices, room=room)
        self.desks: dict[Role, TrainerDesk | SampleDesk] = {
            "trainer": TrainerDesk(self.journal.training, schedule.pass_tokens),
            "generator": SampleDesk(self.journal),
        }
        settings = Settings(
            data_dir=world.folder,
            long_poll_s=20,
            trainer=TrainerSettings(slice_tokens=SLICE_TOKENS),
            limits=Limits(max_queued_ops_per_org=100_000),
        )
        cards = {MODEL: world.ground.card}
        state = world.ground.app.state
        state.service = Service(settings, cards, self.database, blobs, world.ground.prices, self.journal, dict)
        state.keys = KeyCache(world.loop.time)
        recover(self.journal, self.database)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of this server: it, and all tasks that it makes, end when the server dies."""
        context = copy_context()
        context.run(_LIFE.set, self.life)
        return self.world.loop.create_task(work, context=context)

    def forget(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def _killed(self) -> None:
        current = asyncio.current_task()
        for task in list(self.tasks):
            if task is not current:
                task.cancel()
        self.world.loop.call_soon(self.world.server_died, self)

    def bury(self) -> None:
        """Give back the dead server's threads and files."""
        self.life.alive = False
        self.database.close()


class World:
    """`folder` is the service's data folder. Use within a `clock.run`."""

    def __init__(self, ground: Ground, folder: Path, schedule: Schedule) -> None:
        self.ground, self.folder, self.schedule = ground, folder, schedule
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        self.loop = loop
        self.random = random.Random(schedule.seed)
        self.seams: dict[Role, Seams] = {role: Seams(role, schedule.mishaps) for role in (*ROLES, *RANKS)}
        self.statistics: Counter[str] = Counter()
        self.faults: list[BaseException] = []  # exits of workers that were no deaths
        self.server: Server | None = None
        self._up = asyncio.Event()
        self._pages = 0
        self._workers: dict[Role, Worker] = {}
        folder.mkdir(parents=True)
        shutil.copy(ground.empty, folder / "weft.db")
        loop.set_task_factory(self._new_task)

    def _new_task(self, loop: Any, work: Any, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
        life = (context or copy_context()).get(_LIFE)
        if life is not None and self.server is not None and self.server.life is life:
            self.server.tasks[task] = None
            task.add_done_callback(self.server.forget)
        return task

    async def open(self) -> None:
        self._supervisors = [asyncio.create_task(self._supervise(role)) for role in ("trainer", "generator")]
        await self._start_server()

    async def quiet(self) -> None:
        """Wait until a server is up that has settled everything."""
        while True:
            await self._up.wait()
            server = self.server
            if server is not None:
                await asyncio.wait({server.spawn(server.journal.flush())})
                if server.life.alive:
                    return

    async def close(self) -> None:
        """Stop everything."""
        assert self.server is not None
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for worker in self._workers.values():
            worker.life.alive = False
        self.loop.set_task_factory(None)
        self.server.life.alive = False
        for task in list(self.server.tasks):
            task.cancel()
        self.server.bury()

    # -- the server

    async def _start_server(self) -> None:
        server = self.server = Server(self)

        async def start() -> None:
            server.start()

        try:
            await asyncio.gather(server.spawn(start()))
        except (Killed, asyncio.CancelledError):
            return  # `server_died` follows
        except (OSError, OperationalError):  # it logs why, exits, and is started again
            self.statistics["server starts that failed"] += 1
            server.life.die()
            return
        except Exception as error:
            self.note(error)
            server.life.die()
            return
        if server.life.alive:
            self._up.set()

    def server_died(self, server: Server) -> None:
        self.statistics["server deaths"] += 1
        self._up.clear()
        for worker in self._workers.values():
            worker.hang_up()
        server.bury()
        self.server = None

        async def again() -> None:
            await asyncio.sleep(self.random.uniform(0.0, 1.0))
            await self._start_server()

        self._restarting = self.loop.create_task(again())

    async def request(self, organisation: str, method: str, path: str, body: bytes, content_type: str) -> Reply:
        """Send one HTTP request as a client would. Raises ServerLost if no server is there, or it dies, or it has not
        answered after PATIENCE_S (the request goes on then nevertheless)."""
        server = self.server
        if server is None or not self._up.is_set():
            raise ServerLost(path)
        key = self.ground.keys[organisation]
        task = server.spawn(self._serve(server, method, path, body, content_type, key))
        await asyncio.wait({task}, timeout=PATIENCE_S)
        if not task.done() or task.cancelled() or isinstance(task.exception(), Killed) or not server.life.alive:
            raise ServerLost(path)
        reply: Reply = task.result()
        return reply

    async def _serve(self, server: Server, method: str, path: str, body: bytes, kind: str, key: str) -> Reply:
        with server.life.seam("request"):
            return await _asgi(self.ground.app, method, f"/api/v1/{path}", body, kind, key)

    # -- workers

    async def _supervise(self, role: Role) -> None:
        while True:
            await self._up.wait()
            await self.breathe()
            server = self.server
            if server is None or not self._up.is_set():
                continue
            worker = self._workers[role] = Worker(self, role, server.life)
            desk = server.desks[role]
            serving = server.spawn(desk.serve(worker.link))
            try:
                await worker.run()
            finally:
                self.statistics[f"{role} lives"] += 1
                await asyncio.wait({serving})  # a supervisor starts the next one only once the link has ended, too

    def note(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Killed | EOFError):
            self.faults.append(error)

    async def breathe(self) -> None:
        """Let time pass, and others have their turn."""
        if self.schedule.patient:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.random.choice((0.0, 0.0, 0.001, 0.01, 0.05)))

    def trainer_body(self, strand: Strand, life: Life) -> None:
        schedule = self.schedule
        bounds = TrainerBounds(
            microbatch_tokens=schedule.microbatch_tokens,
            snapshot_every_tokens=schedule.snapshot_every_tokens,
            resident_bytes=schedule.resident_runs * self.ground.run_bytes() or 1 << 40,
        )
        self._pages += 1
        if schedule.ranks:
            self._ranks_body(strand, bounds)
            return
        blobs = LivingBlobs(self.folder / "blobs", life)
        trainer = Trainer({MODEL: self.ground.for_training}, blobs, bounds, self.folder / f"pages{self._pages}")
        try:
            serve(trainer, strand, StopFlag())
        finally:
            self.statistics["page ins"] += trainer.residency.page_ins
            trainer.residency.close()

    def _ranks_body(self, strand: Strand, bounds: TrainerBounds) -> None:
        schedule, ground = self.schedule, self.ground
        with suppress(FileExistsError):
            (self.folder / "isolation").symlink_to(ground.isolation)
        lives = {role: Life(role, self.seams, self.loop, lambda: None, strand.wait) for role in RANKS}
        states_bytes = schedule.machine_runs * ground.run_bytes()
        memory = Memory(schedule.most_tokens, states_bytes, schedule.guests, schedule.steps)
        model, base = (MODEL, ground.folder / "t"), ground.folder / "base"
        config = ranks.config_of(self.folder, model, base, bounds, f"pages{self._pages}", schedule)
        ranks.body(strand, self.statistics, lives, config, memory)

    def generator_body(self, strand: Strand, life: Life) -> None:
        schedule = self.schedule
        engine = TorchEngine(
            self.ground.for_sampling,
            EOS,
            slots=schedule.slots,
            context=64,
            prefix_bytes=1 << 20 if schedule.prefix_cache else 0,
            lookup=schedule.lookup,
        )
        engine._adapters._thread.shutdown()
        engine._adapters._thread = _AtOnce()  # type: ignore[assignment]
        blobs = LivingBlobs(self.folder / "blobs", life)
        Generator({MODEL: engine}, blobs, strand, slots=schedule.slots, clock=lambda: time.monotonic()).serve()


class _AtOnce:
    """Stands in for the thread that reads adapters: reads them at once, so that nothing runs at the same time."""

    def submit(self, work: Any, *arguments: Any) -> Future[Any]:
        found: Future[Any] = Future()
        try:
            found.set_result(work(*arguments))
        except Exception as error:
            found.set_exception(error)
        return found

    def shutdown(self, **_options: Any) -> None:
        pass


async def _asgi(app: Any, method: str, path: str, body: bytes, content_type: str, key: str) -> Reply:
    headers = [(b"host", b"weft"), (b"x-api-key", key.encode()), (b"content-type", content_type.encode())]
    headers += [(b"accept", b"application/x-protobuf, application/json"), (b"content-length", b"%d" % len(body))]
    if path.endswith("/create_session"):
        headers.append((b"x-idempotency-key", hashlib.sha256(body).hexdigest().encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "headers": headers,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "server": ("weft", 80),
        "client": ("client", 1),
        "root_path": "",
    }
    sent = False
    over = asyncio.Event()
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await over.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    over.set()
    return Reply(status, b"".join(parts))
