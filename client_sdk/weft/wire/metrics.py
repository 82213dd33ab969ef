"""Curves that a user logs for a run: rewards, losses, whatever has a number at a step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from weft.wire.base import Finite, Request, Response

__all__ = ["LogMetricsRequest", "LogMetricsResponse", "MetricPoint", "RunCurveResponse", "RunMetricsResponse"]

#: How many points one request may have.
MAX_LOGGED_POINTS = 1000

#: The name of a curve, which is shown as a title and used in no path.
MetricName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[ -~]+$")]


class MetricPoint(Request):
    """The value of a curve at a step. Logging the step again replaces it."""

    name: MetricName
    step: Annotated[int, Field(ge=0, le=2**53 - 1)]
    value: Finite


class LogMetricsRequest(Request):
    points: Annotated[list[MetricPoint], Field(min_length=1, max_length=MAX_LOGGED_POINTS)]


class LogMetricsResponse(Response):
    """`new` of the points were at steps that their curves did not have."""

    new: int


class RunCurveResponse(Response):
    """One curve by ascending step. Of its `points` these are the ones to draw. `tokens` and `cost_nusd` are what the
    run had used when each was logged."""

    name: str
    points: int
    steps: list[int]
    values: list[float]
    tokens: list[int]
    cost_nusd: list[int]


class RunMetricsResponse(Response):
    run_id: str
    curves: list[RunCurveResponse]
