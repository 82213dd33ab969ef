"""A worker that stays able to hear when an acknowledgement is lost.

Celery's worker counts messages that it has not acknowledged, and takes no more than its prefetch limit. When the
link dies while a task runs, the acknowledgement fails, is logged, and the message is counted for ever: with a limit of
1, the worker never asks Redis for anything again, and so never notices that the link is dead (measured with Celery 5.7
and kombu 5.7: `tests/scheduler/jobs/test_celery.py`). Here the message stops being counted. Redis still has it and
hands it out again after the visibility timeout, which jobs are made for.
"""

from __future__ import annotations

from celery.app.task import Task
from celery.worker.request import Request
from kombu.transport import virtual


class ForgettingRequest(Request):  # type: ignore[misc]
    def acknowledge(self) -> None:
        super().acknowledge()
        channel = getattr(self.message, "channel", None)
        qos = getattr(channel, "qos", None)
        if isinstance(qos, virtual.QoS):
            # What is counted here, not what Redis has.
            virtual.QoS.ack(qos, self.message.delivery_tag)  # type: ignore[no-untyped-call]


class JobTask(Task):  # type: ignore[misc]
    Request = ForgettingRequest
