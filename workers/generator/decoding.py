"""Decode steps of the running sequences. The plan of a step is kept while the set of sequences stays the same. Where
steps are captured, a step is launched before the tokens of the last one have come (`gpu/ahead.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from workers.generator import forward
from workers.generator.cache.kv_cache import KVCache
from workers.generator.requests.progress import Row, SequenceProgress
from workers.generator.requests.seating import Seating
from workers.generator.tokens.sampling import Draw, SamplingRows, sample
from workers.model.decoder import Decoder

if TYPE_CHECKING:
    from workers.generator.gpu.ahead import Ahead, Flight


class Decoding:
    def __init__(
        self, decoder: Decoder, cache: KVCache, seating: Seating, *, slots: int, context: int, lookup: int
    ) -> None:
        self._decoder, self._cache, self._seating, self._context = decoder, cache, seating, context
        self.launch = _launching(decoder, cache, slots=slots, context=context)
        self.ahead = _ahead(self.launch, seating, lookup)
        self._plan: forward.DecodePlan | None = None  # the plan of all running sequences, while these stay the same
        self._planned = 0  # the value of `seating.changes` at that time

    @property
    def unchanged(self) -> bool:
        """True if the plan is still that of all running sequences."""
        return self._plan is not None and self._planned == self._seating.changes

    def replan(self) -> None:
        """Drop the plan: other sequences run from now on, or with other adapters. A plan holds adapters, which may have
        to make room."""
        self._plan = None

    def drop(self) -> None:
        """Forget the step under way: nobody needs its result."""
        if self.ahead is not None:
            self.ahead.flight = None

    def landed(self) -> Flight | None:
        """The step under way, if it was planned for other sequences than those that run now."""
        if self.ahead is None or self.unchanged:
            return None
        flight, self.ahead.flight = self.ahead.flight, None
        return flight

    def step(self, sequences: Sequence[SequenceProgress], everyone: bool) -> tuple[forward.DecodePlan, list[Draw]]:
        """One step of these sequences (`everyone`: they are all that run); returns its plan and what it drew for each
        row."""
        plan = self._plan if everyone and self.unchanged else None
        if plan is None or not plan.valid:
            plan = forward.DecodePlan(sequences, self._decoder, self._cache, context=self._context)
        if everyone:
            self._plan, self._planned = plan, self._seating.changes
            if self.ahead is not None:
                return plan, self.ahead.step(plan, self.launch)
        return plan, draw(plan.rows, self.launch(plan), plan.sampling)


def draw(rows: Sequence[Row], logits_RV: Tensor, sampling: SamplingRows | None = None) -> list[Draw]:
    if sampling is None:
        sampling = forward.sampling_rows(rows, logits_RV.shape[-1], logits_RV.device)
    return sample(logits_RV, sampling, [row.uniform for row in rows])


def _launching(decoder: Decoder, cache: KVCache, *, slots: int, context: int) -> Callable[..., Tensor]:
    """The function for `forward.decode` here. On a CUDA device steps are captured and replayed, except with latent
    attention or recurrent layers (whose states are other tensors after each step): those are launched piece by
    piece."""
    if cache.device.type != "cuda" or cache.latent or decoder.config.recurrence is not None:
        return partial(forward.decode, decoder, cache)
    from workers.generator.gpu.steps import DecodeSteps  # Triton: only a GPU needs it

    return DecodeSteps.on_device(decoder, cache, slots=slots, context=context)


def _ahead(launch: Callable[..., Tensor], seating: Seating, lookup: int) -> Ahead | None:
    """Launching ahead, where steps are captured and there are no drafts: which tokens a draft tries depends on the last
    ones drawn."""
    if isinstance(launch, partial) or lookup:
        return None
    from workers.generator.gpu.ahead import Ahead

    return Ahead(seating)
