"""Which runs are in the computing memory, and the paging of the others.

Rule: runs that are held (those of the pass in progress) stay; when memory is needed, the least recently held of the
others is evicted. It is written back only if it has changed since its page was written. One thread moves the bytes, in
the order of the requests, so a page is written before it is read and memory is free before it is filled. All calls come
from one other thread. A run that is paged in is bitwise what was paged out.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from scheduler.links.configs import TrainerBounds
from workers.model.adapters.adapter import Adapter
from workers.model.memory import free_bytes, with_room
from workers.trainer.packing import pack
from workers.trainer.runs.arena import Arena, ArenaKind, Arenas, TakeArena
from workers.trainer.runs.pages import PageStore
from workers.trainer.runs.state import RunState

log = logging.getLogger(__name__)

#: A run that was paged in: its arena, the separate gradients of open operations, and whether its page is still up to
#: date.
Loaded = tuple[Arena, list[Tensor], bool]
ResultT = TypeVar("ResultT")


def waves(sizes: Mapping[str, int], budget_bytes: int) -> list[list[str]]:
    """Cut the runs of a pass, in their order, into sets that fit the budget: one set, or sets of half the budget, so
    that the next can be paged in while one computes. A run larger than that is a set of its own."""
    if sum(sizes.values()) <= budget_bytes:
        return [list(sizes)] if sizes else []
    return pack(list(sizes), sizes.__getitem__, budget_bytes // 2)


class Residency:
    """Keeps the arenas of all runs within `budget_bytes`, or of the held ones where those alone are larger."""

    def __init__(self, budget_bytes: int, store: PageStore, device: torch.device) -> None:
        self.budget_bytes = budget_bytes
        self.page_ins = self.page_outs = self.write_backs = 0
        self.waited_s = 0.0  # time spent waiting for runs to be paged in
        self._device, self._store = device, store
        self._arenas = Arenas(budget_bytes, device)
        self._here: OrderedDict[str, RunState] = OrderedDict()  # in memory or on the way, the least recently held first
        self._coming: dict[str, Future[Loaded]] = {}
        self._held: frozenset[str] = frozenset()
        self._used_bytes = 0
        self._stuck: dict[str, Loaded] = {}  # runs that could not be written back: kept in memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pager")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def hold(self, runs: Iterable[str]) -> None:
        """Keep these runs in memory, and no others, from now on; in the order in which they will be needed."""
        order = list(dict.fromkeys(runs))
        self._held = frozenset(order)
        for run_id in order:
            if run_id in self._here:
                self._here.move_to_end(run_id)

    def fetch(self, run: RunState) -> None:
        """Begin to page a run in, if it is not in memory, without waiting."""
        run_id = run.spec.run_id
        if run_id in self._here:
            return
        self._make_room(_size(run))
        self._enter(run)
        self.page_ins += 1
        with_gradient, apart = run.paged_gradient, len(run.paged_apart)
        self._coming[run_id] = self._submit(lambda: self._load(run_id, run.kind, with_gradient, apart))

    def need(self, runs: Sequence[RunState]) -> None:
        """Return when all these runs are in memory. They are held from now on: with others if they were, else alone.
        Where the allocator has no room, all others make it; OSError when that is not enough, for it may be later.
        PageError when a run is lost."""
        wanted = frozenset(run.spec.run_id for run in runs)
        if not wanted <= self._held:
            self._held = wanted
        with_room(lambda: self._need_all(runs), lambda: self.hold_only(runs))

    def _need_all(self, runs: Sequence[RunState]) -> None:
        for run in runs:
            self.fetch(run)
        for run in runs:
            self._arrived(run)

    def hold_only(self, runs: Sequence[RunState]) -> None:
        """Hold only these runs, and free the memory of all others, also of those on their way."""
        self._held = frozenset(run.spec.run_id for run in runs)
        for run_id in [run_id for run_id in self._coming if run_id not in self._held]:
            with suppress(Exception):  # whoever needs that run gets the error then
                self._arrived(self._here[run_id])
        self.squeeze()

    def _arrived(self, run: RunState) -> None:
        coming = self._coming.pop(run.spec.run_id, None)
        if coming is None:
            return
        began = time.monotonic()
        try:
            arena, apart, paged = coming.result()
        except Exception:
            self._leave(run)
            raise
        self.waited_s += time.monotonic() - began
        run.arena = arena
        run.apart = {
            op_id: Adapter(run.kind.shape, flat, run.kind.scale)
            for op_id, flat in zip(run.paged_apart, apart, strict=True)
            if op_id  # unless it was given up meanwhile
        }
        run.dirty = not paged

    def take(self, kind: ArenaKind) -> Arena:
        """An arena for a run that is about to be added; nothing in it may be read before it is written. Where the
        allocator has none, runs that are not held make room; OSError when that is not enough, for it may be later."""
        self._make_room(kind.size_bytes)
        return with_room(lambda: self._submit(lambda: self._arenas.take(kind)).result(), self.squeeze)

    @contextmanager
    def taking(self) -> Iterator[TakeArena]:
        """`take` for a run that is made in the block; if that fails, the arena is given back."""
        taken: list[Arena] = []

        def take(kind: ArenaKind) -> Arena:
            taken.append(self.take(kind))
            return taken[-1]

        try:
            yield take
        except BaseException:
            for arena in taken:
                self._release(arena)
            raise

    def add(self, run: RunState) -> None:
        """Add a run with an arena from `take`; it replaces the run of that id, if there is one."""
        self.forget(run.spec.run_id)
        self._enter(run)

    def forget(self, run_id: str) -> None:
        """Drop a run: free its arena and delete its page."""
        coming = self._coming.pop(run_id, None)
        run = self._here.get(run_id)
        if run is not None:
            self._leave(run)
            arena = run.arena
            if coming is not None:
                with suppress(Exception):  # it never arrived
                    arena = coming.result()[0]
            run.arena, run.apart = None, {}
            if arena is not None:
                self._release(arena)
        self._submit(lambda: self._drop(run_id))

    def squeeze(self) -> None:
        """Free all memory that the held runs do not need."""
        while (run := self._victim()) is not None:
            self._evict(run)
        self._submit(self._arenas.trim).result()

    def is_here(self, run_id: str) -> bool:
        return run_id in self._here

    def settle(self) -> None:
        """Wait until all requested moves are done."""
        self._submit(lambda: None).result()

    @property
    def size_bytes(self) -> int:
        """The bytes of all existing arenas."""
        return self._arenas.size_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that arenas have ever taken."""
        return self._arenas.peak_bytes

    def close(self) -> None:
        """Delete all pages, and end the thread."""
        self._submit(self._store.clear)
        self._thread.shutdown()

    def _enter(self, run: RunState) -> None:
        self._here[run.spec.run_id] = run
        self._used_bytes += _size(run)

    def _leave(self, run: RunState) -> None:
        del self._here[run.spec.run_id]
        self._used_bytes -= _size(run)

    def _make_room(self, size_bytes: int) -> None:
        while self._used_bytes + size_bytes > self.budget_bytes and (run := self._victim()) is not None:
            self._evict(run)

    def _victim(self) -> RunState | None:
        return next((r for i, r in self._here.items() if i not in self._held and i not in self._coming), None)

    def _evict(self, run: RunState) -> None:
        run_id, arena = run.spec.run_id, run.arena
        assert arena is not None
        self._leave(run)
        self.page_outs += 1
        if run.dirty:
            apart = [grad.flat for grad in run.apart.values()]
            run.paged_gradient, run.paged_apart = run.gradient_in_use, tuple(run.apart)
            self.write_backs += 1
            with_gradient = run.paged_gradient
            self._submit(lambda: self._write_back(run_id, arena, apart, with_gradient))
        else:
            self._release(arena)
        run.arena, run.apart = None, {}

    def _release(self, arena: Arena) -> None:
        self._submit(lambda: self._arenas.give(arena))

    # What follows runs in the pager's thread.

    def _submit(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `work` after all work submitted before it, and after what the device was given until now."""
        if self._stream is None:
            return self._thread.submit(work)
        given = torch.cuda.current_stream(self._device).record_event()
        return self._thread.submit(self._beside, given, work)

    def _beside(self, given: torch.cuda.Event, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` on a stream beside the computing; its copies are complete on return. Arenas are allocated on this
        stream too, so that a block which the computing stream has freed, and may still write to, never becomes one."""
        assert self._stream is not None
        given.synchronize()
        with torch.cuda.stream(self._stream):
            result = work()
        self._stream.synchronize()
        return result

    def _write_back(self, run_id: str, arena: Arena, apart: list[Tensor], with_gradient: bool) -> None:
        try:
            self._store.put(run_id, [arena.used(with_gradient), *apart])
        except Exception as error:
            log.warning("run %s stays in memory, it cannot be paged out: %r", run_id, error)
            self._stuck[run_id] = arena, apart, False
            return
        self._arenas.give(arena)

    def _load(self, run_id: str, kind: ArenaKind, with_gradient: bool, apart_count: int) -> Loaded:
        stuck = self._stuck.pop(run_id, None)
        if stuck is not None:
            return stuck
        arena = self._arenas.take(kind)
        try:
            apart = [arena.flat.new_empty(kind.shape.numel) for _ in range(apart_count)]
            if self._stream is not None:
                for flat in apart:
                    # it will be used, and freed, on that stream
                    flat.record_stream(torch.cuda.default_stream(self._device))
            self._store.get(run_id, [arena.used(with_gradient), *apart])
        except BaseException:
            self._arenas.give(arena)
            raise
        return arena, apart, True

    def _drop(self, run_id: str) -> None:
        if (stuck := self._stuck.pop(run_id, None)) is not None:
            self._arenas.give(stuck[0])
        self._store.drop(run_id)


def resident_within(bounds: TrainerBounds, pages_dir: Path, device: torch.device) -> Residency:
    """A Residency with these budgets; 0 takes half of the memory that is free now, or its part of that half."""
    host_bytes, share = bounds.host_bytes, 2 * bounds.trainers
    if device.type == "cpu":
        host_bytes = 0  # with a host tier, the same memory would be counted twice
    elif not host_bytes:
        host_bytes = free_bytes(torch.device("cpu")) // share
    return Residency(bounds.resident_bytes or free_bytes(device) // share, PageStore(pages_dir, host_bytes), device)


def _size(run: RunState) -> int:
    return run.kind.size_bytes
