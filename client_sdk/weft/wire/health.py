"""Body of `GET /api/v1/weft/runs/{run_id}/health`: how a run's loop is doing."""

from __future__ import annotations

from typing import Literal

from weft.wire.base import Response


class StallReport(Response):
    """What the run waits for now. `sentence` says all of this in words: "waiting for 3 of 32 groups; oldest sample 412
    s, ..."."""

    waiting_for: Literal["sampling", "training", "client"]
    open_groups: int
    groups: int
    open_training: int
    oldest_request_id: str | None
    oldest_s: float
    reason: str
    sentence: str


class RunHealthResponse(Response):
    """Over the last `window_s` seconds. `trainer_wait` is the share of them in which the trainer computed nothing for
    this run, `generator_occupancy` the share of the server's slots busy with anybody's work, `sampling_wait` the share
    of its samples' time in which they waited for a place in a generator, `acceptance` trained tokens for each sampled
    one, and `staleness` how many sampled tokens were that many optimizer steps old when trained on. `named`: training
    data name their sampled sequences, so `acceptance` and `staleness` are known and not inferred; so are the
    `untrained_tokens`, which were sampled before the latest batch and are in no batch."""

    run_id: str
    window_s: float
    trainer_wait: float
    generator_occupancy: float
    sequences_in_flight: float
    sampled_tokens: int
    trained_tokens: int
    sampled_tokens_per_s: float
    trained_tokens_per_s: float
    acceptance: float
    staleness: dict[int, int]
    named: bool = False
    untrained_tokens: int | None = None
    queue_p50_s: float
    queue_p95_s: float
    sampling_wait: float | None = None
    stall: StallReport
