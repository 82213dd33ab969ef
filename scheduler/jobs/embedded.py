"""The jobs of a server that has no Celery: one thread that asks the database what is due, and runs it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from scheduler.jobs.registry import Job, JobContext
from scheduler.jobs.running import run_if_due, states

log = logging.getLogger(__name__)

#: Longest time between a job becoming due and its start, when no other one is running.
LOOK_EVERY_S = 1.0
#: How long the job in hand may take when the server stops. What it leaves undone is due again when its lease has ended.
STOP_S = 10.0


class EmbeddedJobs:
    """Runs until `stop`, which waits a while for the job in hand. Servers that share a database share the work: the
    lease of each job decides who runs it."""

    def __init__(self, context: JobContext, jobs: Mapping[str, Job]) -> None:
        self._context = context
        self._jobs = jobs
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _work(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            try:
                self._round()
            except Exception:
                log.exception("cannot see which jobs are due; looking again")

    def _round(self) -> None:
        now = self._context.now()
        with self._context.database.read() as session:
            due = [state.job for state in states(session, self._jobs, now) if state.due(now)]
        for job in due:
            if self._stopping.is_set():
                return
            run_if_due(self._context, job)
