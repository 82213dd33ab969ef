"""Logging curves: points gather while others are under way, and go to the server in the background.

A log never delays or breaks training: what the server does not take is dropped, with a warning.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from weft.errors import WeftError
from weft.future import background, finish_before_exit, outlasting
from weft.runs.run import Run
from weft.transport.http import Call, encode
from weft.wire.metrics import MAX_LOGGED_POINTS, LogMetricsRequest, MetricPoint

logger = logging.getLogger("weft")

#: How long points are collected before they are sent.
GATHER_S = 0.5
#: How many points may wait to be sent; beyond it the oldest are dropped.
MAX_WAITING = 100_000
#: How long the end of a session waits for points that are not sent yet.
LAST_CHANCE_S = 10.0


class Curves:
    """The curves of one run. Points are sent once `made` is done: the run then exists on the server."""

    def __init__(self, run: Run, made: Future[Any]) -> None:
        self._run = run
        self._made = made
        self._waiting: deque[MetricPoint] = deque(maxlen=MAX_WAITING)
        self._lock = threading.Lock()
        self._sending: Future[None] | None = None
        self._next_step = 0
        self._refused = set[str]()  # names that a warning was given for

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Note `metrics` at `step`, by default the one after the last. Returns at once."""
        with self._lock:
            at = self._next_step if step is None else step
            self._waiting.extend(self._points(metrics, at))
            self._next_step = at + 1
            started = self._sending is None and bool(self._waiting)
            if started:
                self._sending = background().run(self._send())
            sending = self._sending
        if sending is not None and self not in self._run.session.closing:
            self._run.session.closing.append(self)
        if sending is not None and started:
            finish_before_exit(sending)

    def _points(self, metrics: Mapping[str, float], step: int) -> list[MetricPoint]:
        """The metrics that a curve can show. Others only cause a warning: an environment names its own metrics, and a
        bad name must not stop a run after hours."""
        points = []
        for name, value in metrics.items():
            try:
                finite = math.isfinite(value)
            except TypeError:
                raise TypeError(f"metric {name!r} must be a number, got {value!r:.80}") from None
            if not finite:
                logger.warning("%s is %s at step %d: not logged", name, value, step)
                continue
            try:
                points.append(MetricPoint(name=name, step=step, value=float(value)))
            except ValidationError as error:
                if name not in self._refused:
                    self._refused.add(name)
                    why = "; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors())
                    logger.warning("%r is not logged at step %s (told once): %s", name, step, why)
        return points

    async def flush(self) -> None:
        """Wait until every point is sent or dropped, at most LAST_CHANCE_S."""
        sending = self._sending
        if sending is not None:
            with suppress(Exception):
                await asyncio.wait_for(outlasting(asyncio.wrap_future(sending)), LAST_CHANCE_S)

    async def _send(self) -> None:
        try:
            await outlasting(asyncio.wrap_future(self._made))
            while await self._send_some():
                pass
        except WeftError as error:
            with self._lock:
                dropped = len(self._waiting)
                self._waiting.clear()
                self._sending = None
            logger.warning("%d logged points were dropped: %s", dropped, error)

    async def _send_some(self) -> bool:
        """Send one request. Returns False if no point waits; the next `log` then starts sending again."""
        if not self._run.session.ending.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._run.session.ending.wait(), GATHER_S)
        with self._lock:
            count = min(len(self._waiting), MAX_LOGGED_POINTS)
            points = [self._waiting.popleft() for _ in range(count)]
            if not points:
                self._sending = None
                return False
        body = encode(LogMetricsRequest(points=points).body())
        path = f"/weft/runs/{self._run.model_id}/metrics"
        try:
            await self._run.session.transport.send(Call("POST", path, body))
        except WeftError as error:
            logger.warning("%d logged points were dropped: %s", len(points), error)
        return True
