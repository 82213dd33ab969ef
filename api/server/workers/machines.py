"""The running parts behind the HTTP front: the journal, the desks, and the worker processes."""

from __future__ import annotations

import socket
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from api.checks.adapter_sizes import sizes_of
from api.server.workers.nursery import Nursery
from api.server.workers.supervisor import STORE_WITHIN_S, Supervisor
from api.server.workers.worker_programs import embedded_workers
from billing.prices import PriceList
from scheduler.dispatch.sample_desk import SampleDesk
from scheduler.dispatch.trainer_desk import TrainerDesk
from scheduler.journal.front import OperationJournal
from scheduler.journal.journal import Journal
from scheduler.journal.recovery import recover
from scheduler.links.messages import Drain
from scheduler.links.sockets import ServerLink
from store.blobs.contract import Blobs
from store.database.db import Database
from store.settings import Settings
from workers.model.base.files import remove_unused
from workers.model.card import ModelCard


class Machines(Protocol):
    """The journal, desks and workers behind the application, from `start` to `stop`."""

    @property
    def journal(self) -> OperationJournal: ...

    def start(self) -> None: ...

    async def ready(self) -> None:
        """Wait until all workers that were started are there. Raises WorkerFailed."""

    def drain(self) -> None:
        """Accept nothing new from now on."""

    async def stop(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        """Counts of what the machines do."""

    def processes(self) -> dict[str, int]:
        """The worker processes that are children of this process, by role."""


class EmbeddedMachines:
    """One journal with its desks and workers, from `start` to `stop`. Built inside the event loop it lives in.
    The `nursery` forks the workers."""

    def __init__(
        self,
        settings: Settings,
        cards: dict[str, ModelCard],
        database: Database,
        blobs: Blobs,
        prices: PriceList,
        nursery: Nursery | None = None,
    ) -> None:
        self._settings = settings
        self._database = database
        self.journal = Journal(
            database,
            blobs,
            prices,
            settings.limits.max_queued_ops_per_org,
            settings.limits.max_queued_bytes_per_org,
            sizes=sizes_of(cards),
            limits=settings.limits,
        )
        trainer, kinds = settings.trainer, settings.generator.kinds
        self._trainer = TrainerDesk(
            self.journal.training,
            trainer.pass_tokens,
            trainer.pass_limit_s,
            loading_s=partial(self._loads_for_s, "trainer"),
        )
        self._generator = SampleDesk(self.journal, len(kinds), partial(self._loads_for_s, "generator"))
        models = {name: card.path for name, card in cards.items()}
        self._supervisor = Supervisor(embedded_workers(settings, models), self._attach, nursery)

    def start(self) -> None:
        """Take up what the last process left, then start the workers."""
        recover(self.journal, self._database)
        self._supervisor.start()

    async def ready(self) -> None:
        """Wait until every worker has attached once."""
        await self._supervisor.wait_attached()

    def drain(self) -> None:
        """Accept nothing new from now on; workers finish what they have and are not restarted. Later calls do
        nothing."""
        if self.journal.draining:
            return
        self.journal.draining = True
        self._supervisor.retire()
        self._trainer.drain()
        self._generator.drain()

    async def stop(self) -> None:
        self.drain()
        await self._supervisor.stop(self._settings.drain_s)
        if self._settings.base_dir:
            remove_unused(Path(self._settings.base_dir))  # bases of workers that were killed
        await self.journal.stop(STORE_WITHIN_S)

    def stats(self) -> dict[str, Any]:
        workers = [asdict(status) for status in self._supervisor.status()]
        for worker in workers:
            del worker["pid"]
        return {
            "trainer": {**self._trainer.report(), "loading": self._loading("trainer")},
            "generator": {
                **self._generator.stats,
                "replicas": self._generator.replicas(),
                "loading": self._loading("generator"),
            },
            "workers": workers,
        }

    def processes(self) -> dict[str, int]:
        return {status.role: status.pid for status in self._supervisor.status() if status.pid is not None}

    def _loading(self, role: str) -> dict[str, float]:
        return {name: age_s for name, age_s in self._supervisor.loading_s().items() if name.startswith(role)}

    def _loads_for_s(self, role: str, _model: str) -> float | None:
        """For how long a worker of that role has been loading; all workers here load all models."""
        return max(self._loading(role).values(), default=None)

    async def _attach(self, role: str, sock: socket.socket) -> None:
        link = ServerLink(sock)
        if self.journal.draining:  # it attached after the others had been told to drain
            link.send(Drain())
        try:
            desk = self._trainer if role.startswith("trainer") else self._generator
            await desk.serve(link, role)
        finally:
            link.close()
