"""What an operation is to do, beyond what its body says: one struct for each kind of operation.

The route that accepts an operation makes its plan; the row of the operation keeps it as JSON
(`scheduler.journal.rows`), so that it can be queued again after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from scheduler.links.messages import RunSpec


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A part of a forward_backward that is computed in one piece: the data [start, stop) of its body. In the fair order
    they count as `tokens` tokens together: with an uploaded loss more than they have. In JSON [start, stop, tokens]."""

    start: int
    stop: int
    tokens: int


def slices(costs: Sequence[int], slice_tokens: int) -> list[Slice]:
    """Cut an operation into ranges of its data, each of as many data as fit `slice_tokens`, at least one.

    Where it is cut depends on the operation's own data alone: floating-point sums then come out the same whatever
    shares the pass.

        slices([5, 5, 20, 1], 10) -> [Slice(0, 2, 10), Slice(2, 3, 20), Slice(3, 4, 1)]
    """
    cuts: list[Slice] = []
    for index, cost in enumerate(costs):
        if cuts and cuts[-1].tokens + cost <= slice_tokens:
            cuts[-1] = Slice(cuts[-1].start, index + 1, cuts[-1].tokens + cost)
        else:
            cuts.append(Slice(index, index + 1, cost))
    return cuts


class Source(msgspec.Struct, frozen=True):
    """The checkpoint that weights are loaded from: the folder of its files, its path as the client wrote it
    (tinker://...), and whether its optimizer's state is loaded too."""

    ref: str
    path: str
    with_optimizer: bool


class Create(msgspec.Struct, frozen=True, tag=True):
    """create: a run, fresh from the seed in `spec` or on the weights of `source`. `priority` (interactive or batch)
    holds for all operations of the run."""

    spec: RunSpec
    priority: str
    source: Source | None = None


class Load(msgspec.Struct, frozen=True, tag=True):
    """load_state: weights into a run that exists."""

    source: Source


#: Stands for an unknown time: the client has sent the request again, and nobody knows when it first tried.
SENT_AGAIN = datetime.fromtimestamp(0, UTC)


class ForwardBackward(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """forward and forward_backward: `slices` cover all data of the body, in their order. `sequences` are the sampled
    sequences that the data say they come from, with their tokens among the targets. Its request came at
    `came_at`, before its data did, or is SENT_AGAIN."""

    slices: tuple[Slice, ...]
    sequences: dict[str, int] = {}
    came_at: datetime | None = None


class Save(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """save_state, save_sampler and save_external under a name: the checkpoint tinker://<run>/<kind>/<name>. It expires
    `ttl_seconds` after it is made, or never. With `overwrite` it replaces a checkpoint of that name; else such a
    checkpoint makes it fail."""

    kind: Literal["weights", "sampler_weights", "external_weights"]
    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] = {}


class NewSampler(msgspec.Struct, frozen=True, tag=True):
    """save_sampler without a name: a sampler of the weights at that moment, the session's sampler `number`. With
    `inflight` it moves to the weights of each later such save of its run."""

    sampler_id: str
    number: int
    inflight: bool


class Sample(msgspec.Struct, frozen=True, tag=True):
    """sample: `num_samples` sequences behind a prompt of `prompt_tokens` tokens. `priority` is interactive or
    batch."""

    num_samples: int
    prompt_tokens: int
    priority: str


class Step(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """optim_step: the settings in its body, by name, for people who look at the run when the body is gone. The trainer
    reads the body. `heard_of`: the failures that its client knows of (`weft.wire.OptimStepRequest`)."""

    settings: dict[str, float]
    heard_of: int | None = None


class BodyOnly(msgspec.Struct, frozen=True, tag=True):
    """An operation that its body describes completely. Also a refused request, or a repeat: nothing is done for
    these."""


BODY_ONLY = BodyOnly()

Plan = Create | Load | ForwardBackward | Save | NewSampler | Sample | Step | BodyOnly
