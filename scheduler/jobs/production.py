"""The same jobs carried by Celery on Redis: `weftd jobs beat` says "look" every few seconds, a worker looks which jobs
are due and runs each as a task of its own. Messages carry names and nothing else, so one that is lost, late or doubled
changes nothing: the next look finds what is due in the database.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.app.task import Task
from celery.signals import setup_logging
from celery.worker.request import Request
from kombu.transport import virtual

from scheduler.jobs.catalogue import JOBS
from scheduler.jobs.context import open_context
from scheduler.jobs.registry import JobContext
from scheduler.jobs.running import LEASE_S, run_if_due, states
from store.settings import Settings, SettingsError

#: Pause between two looks; a job may start this late.
LOOK_EVERY_S = 5.0
#: A "look" that nobody took in this time is dropped: a newer one says the same.
LOOK_EXPIRES_S = 3 * LOOK_EVERY_S
#: A task is killed before its lease ends, so that a job never runs twice at once.
TASK_LIMIT_S = LEASE_S - 30.0

#: Without `socket_timeout` a worker whose connection dies silently hears nothing for ever, and looks alive
#: (docs/jobs.md). The visibility timeout is when Redis hands out an unacknowledged task again.
TRANSPORT_OPTIONS = {
    "visibility_timeout": 2 * LEASE_S,
    "socket_timeout": 15.0,
    "socket_connect_timeout": 5.0,
    "socket_keepalive": True,
    "health_check_interval": 10,
    "retry_on_timeout": True,
}


class ProcessContext:
    """The context of this process, opened on first use: a database connection does not survive the fork of a worker."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._opened: tuple[int, JobContext] | None = None

    def __call__(self) -> JobContext:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), open_context(self._settings))
        return self._opened[1]


class ForgettingRequest(Request):  # type: ignore[misc]
    """A request whose worker keeps receiving messages after an acknowledgement is lost.

    Celery's worker counts messages that it has not acknowledged, and takes no more than its prefetch limit. When the
    link dies while a task runs, the acknowledgement fails, is logged, and the message is counted for ever: with a limit
    of 1, the worker never asks Redis for anything again, and so never notices that the link is dead (measured with
    Celery 5.7 and kombu 5.7: `tests/scheduler/jobs/test_celery.py`). Here the message stops being counted. Redis still
    has it and hands it out again after the visibility timeout; jobs may run twice.
    """

    def acknowledge(self) -> None:
        super().acknowledge()
        channel = getattr(self.message, "channel", None)
        qos = getattr(channel, "qos", None)
        if isinstance(qos, virtual.QoS):
            # Forgets the message in the worker's count only; Redis still has it.
            virtual.QoS.ack(qos, self.message.delivery_tag)  # type: ignore[no-untyped-call]


class JobTask(Task):  # type: ignore[misc]
    Request = ForgettingRequest


def celery_app(settings: Settings) -> Any:
    """The Celery application of worker and beat. Raises SettingsError if the settings name no Redis."""
    context = ProcessContext(settings)
    broker = settings.jobs.redis_url or settings.redis_url
    if not broker:
        raise SettingsError("there is no Redis to carry jobs: set redis_url, or jobs.redis_url (docs/jobs.md)")
    app = Celery("weft", broker=broker)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_time_limit=TASK_LIMIT_S,
        task_default_queue="weft-jobs",
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options=TRANSPORT_OPTIONS,
        timezone="UTC",
        beat_scheduler="celery.beat:Scheduler",  # kept in memory: the database records what ran
        beat_schedule={
            "look": {"task": "weft.look", "schedule": LOOK_EVERY_S, "options": {"expires": LOOK_EXPIRES_S}},
        },
    )

    def run(name: str) -> None:
        run_if_due(context(), JOBS[name])

    run_task = app.task(name="weft.runs.run", base=JobTask)(run)

    def look() -> None:
        here = context()
        now = here.now()
        with here.database.read() as session:
            due = [state.job.name for state in states(session, JOBS, now) if state.due(now)]
        for name in due:
            run_task.apply_async(args=[name], expires=LOOK_EXPIRES_S)

    app.task(name="weft.look", base=JobTask)(look)
    setup_logging.connect(_as_it_is)
    return app


def _as_it_is(**_: Any) -> None:
    """Celery does not set up logging if a receiver of this signal exists: `store.logs` has done so."""
