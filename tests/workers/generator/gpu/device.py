"""A device in the host's memory: steps over fixed tensors as on a GPU, each of them computed by the CPU's attention of
what lies in its tensors, so that it has the bits of plain decoding. Wherever something is sent, computed or received,
it may fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.workers.model.gpu_kit  # noqa: F401  (before the kernels)
from workers.generator import decoding, forward, torch_engine
from workers.generator.attention.decode_attend import DecodeAttend
from workers.generator.cache import prefix_cache
from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache, copy_pages
from workers.generator.cache.prefix_cache import PrefixCache
from workers.generator.forward import DecodePlan
from workers.generator.gpu import ahead as ahead_module, step as step_module, steps as steps_module
from workers.generator.gpu.ahead import Ahead, Flight
from workers.generator.gpu.step import Step
from workers.generator.gpu.steps import Computed, DecodeSteps
from workers.generator.requests.progress import RequestProgress, SequenceProgress
from workers.generator.requests.seating import Seating, Unmoved
from workers.generator.tokens.prompt_scores import land
from workers.generator.tokens.sampling import Draw, chosen, sample
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter
from workers.model.lora.rows import LoraRows


class Failed(RuntimeError):
    """The error of something that the test's program has made fail."""


@dataclass
class Faults:
    """Lets each point fail at a given chance, and notes who was to blame."""

    draw: Random
    chance: float
    #: The requests that were computed alone when something failed: only these may end with that error.
    blamed: set[str] = field(default_factory=set)
    failed: Counter[str] = field(default_factory=Counter)
    #: The requests that are being computed.
    batch: list[str] = field(default_factory=list)

    def at(self, point: str, times: int = 1, of: str = "") -> None:
        """Maybe fail. `times` as likely: for rare events. `of`: the one request that it concerns, if it does."""
        if self.draw.random() < times * self.chance:
            self.failed[point] += 1
            batch = [of] if of else self.batch
            if len(batch) == 1:
                self.blamed.update(batch)
            raise Failed(point)


class HostStep(Step):
    """A `Step` without kernels."""

    _loaded: Sequence[Adapter | None] = ()

    def load(self, adapters: Sequence[Adapter | None]) -> None:
        super().load(adapters)
        self._loaded = [*adapters, *[None] * (self._rows - len(adapters))]

    def compute(self) -> Computed:
        tokens_R, positions_R = self._inputs_2R
        attend = DecodeAttend(self._cache, self._table_GRW.numpy().copy(), positions_R.tolist())
        adapters = list(self._loaded) if self._adapters is not None else [None] * self._rows
        lora = LoraRows(range(self._rows + 1), adapters, [None] * self._rows)
        chosen: list[Tensor] = []
        hidden_RD = self._decoder(tokens_R, positions_R, attend, lora, lambda _, experts_TK: chosen.append(experts_TK))
        return self._decoder.logits(hidden_RD, lora), chosen


def replayed(function: Callable[[], Computed]) -> tuple[Callable[[], None], Computed]:
    """A `Capture` whose replays compute anew, into the tensors of the first time."""
    logits_RV, chosen = function()

    def replay() -> None:
        again_RV, others = function()
        for old, new in zip([logits_RV, *chosen], [again_RV, *others], strict=True):
            old.copy_(new)

    return replay, (logits_RV, chosen)


class Reader:
    """Stands for the thread that reads adapters, but reads them when told to."""

    def __init__(self) -> None:
        self._asked: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, read: Callable[..., Any], *args: object) -> Future[Any]:
        found: Future[Any] = Future()
        self._asked.append((found, lambda: read(*args)))
        return found

    def deliver(self) -> None:
        asked, self._asked = self._asked, []
        for found, read in asked:
            if found.set_running_or_notify_cancel():
                try:
                    found.set_result(read())
                except Exception as error:
                    found.set_exception(error)

    def shutdown(self, **_: object) -> None:
        pass


class Device:
    """Stands for an engine's plain decoding, and checks each step's pages."""

    def __init__(self, made: TorchEngine, faults: Faults, *, slots: int, context: int, captures: bool) -> None:
        self.made, self.faults, self.cache = made, faults, made._cache
        made._decoder.rotary(torch.arange(context))  # as long as it gets
        self.steps = DecodeSteps(
            made._decoder, made._cache, slots=slots, context=context, capture=replayed if captures else None
        )
        self.reader = Reader()
        made._decoding.launch = self
        made._adapters._thread = self.reader  # type: ignore[assignment]
        if made._drafts._most == 0:
            made._decoding.ahead = Ahead(made._seating)
        #: For each request the position from which on its logits are not finite.
        self.spoilt: dict[str, int] = {}
        self.ahead = 0
        #: What steps must not do, as it is found: an engine survives what a step raises.
        self.wrong: list[str] = []

    def __call__(self, plan: DecodePlan, after: Tensor | None = None) -> Tensor:
        logits_RV = self.steps(plan, after)
        self.ahead += after is not None
        rows = plan.rows if after is None else plan.next_rows
        self._look(plan, [row.position for row in rows])
        for at, row in enumerate(rows):
            if row.position >= self.spoilt.get(row.owner.request.id, 1 << 30):
                logits_RV[at] = torch.nan
        return logits_RV

    def _look(self, plan: DecodePlan, positions: Sequence[int]) -> None:
        """Each row has read its own sequence's pages, and written to one that nobody else holds."""
        current = self.steps._current
        assert current is not None
        for at, (row, position) in enumerate(zip(plan.rows, positions, strict=True)):
            for group, held in enumerate(row.pages):
                sent = current.step._table_GRW[group, at, held.gone : position // PAGE_TOKENS + 1].tolist()
                if sent != held.pages[: len(sent)]:
                    self.wrong.append(f"{row.owner.request.id} has read {sent}, and has {held.pages}")
                if self.made._seating.pool._holders[held.of(position)] != 1:
                    self.wrong.append(f"{row.owner.request.id} has written to a page that others hold")


def assert_pages(engine: TorchEngine) -> None:
    """No page is owned twice or lost."""
    seating = engine._seating
    owned = [*(sequence.pages for sequence in seating._seated), *seating._paused.values()]
    held = Counter(page for pages in owned for of in pages for page in of.pages)
    assert [held[page] for page in range(seating.pool.count)] == seating.pool._holders
    assert sorted(seating.pool._free) == [page for page in range(seating.pool.count) if not held[page]]
    assert len(seating._seated) <= seating.rows
    here = set(engine._open.here.values())
    assert {sequence.owner for sequence in [*seating._seated, *seating._paused, *seating._out]} <= here


def _failing(
    faults: Faults, point: str, function: Callable[..., Any], *, after: bool = False, times: int = 1, of: str = ""
) -> Callable[..., Any]:
    def guarded(*args: Any, **options: Any) -> Any:
        if not after:
            faults.at(point, times, of)
        found = function(*args, **options)
        if after:
            faults.at(point, times, of)
        return found

    return guarded


@contextmanager
def failing(faults: Faults) -> Iterator[None]:
    """Make engines' devices fail where something is sent to them (inputs, adapters), computed, or received."""
    survive = TorchEngine._survive

    def noted(self: TorchEngine, batch: list[RequestProgress], work: Callable[[list[RequestProgress]], None]) -> None:
        faults.batch, before = [progress.request.id for progress in batch], faults.batch
        try:
            survive(self, batch, work)
        finally:
            faults.batch = before

    def put(target: Tensor, values: np.ndarray[Any, Any]) -> None:
        if values.dtype == np.int32:
            faults.at("sending pages", 10)
        else:
            faults.at("sending inputs")
        _put(target, values)

    def accept(self: SequenceProgress, drawn: Draw, version: int) -> None:
        accepted(self, drawn, version)
        faults.at("looking for an end", of=self.owner.request.id)

    def routes(self: Seating, sequence: SequenceProgress) -> Any:
        faults.at("receiving routes", 10, of=sequence.owner.request.id)
        return received(self, sequence)

    def unmoved(self: Unmoved, sequence: SequenceProgress, why: Exception) -> None:
        faults.blamed.add(sequence.owner.request.id)
        said(self, sequence, why)

    def save(self: PrefixCache, *args: Any) -> None:
        def copy(*pages: Any) -> None:
            faults.at("keeping blocks", 5)
            copied(*pages)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefix_cache, "copy_pages", copy)
            saved(self, *args)

    saved, copied, said = PrefixCache.save, copy_pages, Unmoved.__init__
    accepted, received, _put = SequenceProgress.accept, Seating.routes, step_module._put
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_engine, "READ_WAIT_S", 0)
        patch.setattr(TorchEngine, "_survive", noted)
        patch.setattr(step_module, "_put", put)
        patch.setattr(step_module, "MAX_SINGLE_ROWS", 2)
        patch.setattr(steps_module, "Step", HostStep)
        patch.setattr(HostStep, "load", _failing(faults, "sending adapters", HostStep.load))
        patch.setattr(HostStep, "compute", _failing(faults, "launching", HostStep.compute))
        patch.setattr(DecodeSteps, "__call__", _failing(faults, "after a launch", DecodeSteps.__call__, after=True))
        patch.setattr(ahead_module, "chosen", _failing(faults, "choosing", chosen))
        patch.setattr(Flight, "draws", _failing(faults, "receiving", Flight.draws))
        patch.setattr(decoding, "sample", _failing(faults, "drawing", sample))
        patch.setattr(torch_engine, "land", _failing(faults, "receiving scores", land))
        patch.setattr(KVCache, "copy", _failing(faults, "copying a page", KVCache.copy, times=10))
        patch.setattr(
            KVCache, "take_out", _failing(faults, "taking pages out", KVCache.take_out, times=10, of="their owner")
        )
        patch.setattr(
            KVCache, "bring_in", _failing(faults, "bringing pages in", KVCache.bring_in, times=10, of="their owner")
        )
        patch.setattr(Unmoved, "__init__", unmoved)
        patch.setattr(PrefixCache, "save", save)
        patch.setattr(SequenceProgress, "accept", accept)
        patch.setattr(Seating, "routes", routes)
        patch.setattr(forward, "prefill", _failing(faults, "prefill", forward.prefill))
        yield
