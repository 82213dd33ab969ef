"""Decoding on a device: a plan runs through a step that fits its rows, rounded up (`bucket`), and its adapters' forms.

A step is captured when it is needed for the second time; beyond MAX_STEPS the least recently used is dropped. A
captured step does not contain its adapters, so any set with the same forms can be loaded into it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from workers.generator.cache.kv_cache import KVCache, pages_of
from workers.generator.forward import DecodePlan
from workers.generator.gpu.capture import Capture, CudaGraphs, Repeated
from workers.generator.gpu.step import Step
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder
from workers.model.gpu.segments import forms

#: How many steps are kept, one for each size and set of adapter forms.
MAX_STEPS = 32

Computed = tuple[Tensor, list[Tensor]]


class DecodeSteps:
    """Called like `forward.decode`; the result must be used before the next call. Not thread-safe."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, slots: int, context: int, capture: Capture[Computed] | None
    ) -> None:
        self._decoder, self._cache, self._capture = decoder, cache, capture
        self._slots, self._width = slots, pages_of(context)
        self._steps: OrderedDict[tuple[int, frozenset[AdapterShape]], _Repeated] = OrderedDict()
        #: All steps write their logits here, so that each captured step needs no memory of its own for them.
        self._logits_RV = torch.empty(slots, decoder.config.vocab_size, device=cache.device)
        #: The plan whose adapters are loaded, and the step they are loaded in.
        self._plan: Callable[[], DecodePlan | None] = lambda: None
        self._current: _Repeated | None = None

    @classmethod
    def on_device(cls, decoder: Decoder, cache: KVCache, *, slots: int, context: int) -> DecodeSteps:
        return cls(decoder, cache, slots=slots, context=context, capture=CudaGraphs[Computed]())

    def __call__(self, plan: DecodePlan, after: Tensor | None = None) -> Tensor:
        """The logits of the plan's rows, [R, V]. `after`: the tokens that the step before has drawn, still on the
        device, to be used as the rows' tokens (`ahead.py`)."""
        plan.turn_pages()
        step, compute = self._loaded(plan)
        rows = plan.rows if after is None else plan.next_rows
        positions = [row.position for row in rows]
        step.feed([row.token for row in rows] if after is None else after, positions, plan.table_GRW)
        logits_RV, chosen = compute()
        if plan.routed:
            pages = [row.pages[0].of(position) for row, position in zip(rows, positions, strict=True)]
            self._cache.record_routes(pages, positions, [experts_TK[: len(pages)] for experts_TK in chosen])
        return logits_RV[: len(positions)]

    def _loaded(self, plan: DecodePlan) -> _Repeated:
        if self._current is None or self._plan() is not plan:
            self._plan = lambda: None
            adapters = plan.lora.adapters if plan.lora is not None else []
            self._current = self._step(bucket(len(plan.rows), self._slots), forms(adapters))
            self._current.step.load(adapters)
            self._plan = ref(plan)
        return self._current

    def _step(self, rows: int, shapes: frozenset[AdapterShape]) -> _Repeated:
        found = self._steps.get((rows, shapes))
        if found is None:
            step = Step(self._decoder, self._cache, rows=rows, width=self._width, forms=shapes)
            found = self._steps[rows, shapes] = _Repeated(step, Repeated(self._into_place(step), self._capture))
            if len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end((rows, shapes))
        return found

    def _into_place(self, step: Step) -> Callable[[], Computed]:
        def compute() -> Computed:
            logits_RV, chosen = step.compute()
            return self._logits_RV[: len(logits_RV)].copy_(logits_RV), chosen

        return compute


class _Repeated(NamedTuple):
    step: Step
    compute: Repeated[Computed]


def bucket(rows: int, slots: int) -> int:
    """Round rows up to a captured size: a power of two, or all slots."""
    return min(1 << (rows - 1).bit_length(), slots)
