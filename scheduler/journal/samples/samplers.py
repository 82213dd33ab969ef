"""Which weights each sampler samples from now: the base model, a snapshot, or the newest weights of the run that it
follows."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TypeVar

import anyio.to_thread

from store import tables
from store.database.db import Transactions

V = TypeVar("V")

#: How many samplers are remembered.
MOST = 10_000


@dataclass(frozen=True)
class SamplerFacts:
    org_id: str
    base_model: str
    adapter_ref: str
    run_id: str | None
    inflight: bool


class Samplers:
    """Reads facts of samplers from the database, and remembers the most recently used. Lives in the event loop."""

    def __init__(self, database: Transactions, *, runs_move_elsewhere: bool = False) -> None:
        """`runs_move_elsewhere`: other replicas save weights, too, so those of a followed run are looked up each
        time."""
        self._database = database
        self._runs_move_elsewhere = runs_move_elsewhere
        self._known: OrderedDict[str, SamplerFacts] = OrderedDict()
        self._moves = 0
        self._runs: OrderedDict[str, str | None] = OrderedDict()

    def facts(self, sampler_id: str) -> SamplerFacts:
        known = self._known.get(sampler_id)
        if known is None or (known.inflight and self._runs_move_elsewhere):
            known = self._read(sampler_id)
        _keep(self._known, sampler_id, known)
        return known

    async def learn(self, sampler_id: str) -> None:
        """Read the facts of a sampler in a thread so that `facts` knows them; again if weights have moved meanwhile."""
        while sampler_id not in self._known:
            moves = self._moves
            facts = await anyio.to_thread.run_sync(self._read, sampler_id)
            if moves == self._moves:
                _keep(self._known, sampler_id, facts)

    async def run_of(self, sampler_id: str) -> str | None:
        """The run that a sampler follows, or that its weights come from. This never changes. Its other facts may change
        while they are read in a thread, so they are not remembered here."""
        if (known := self._known.get(sampler_id)) is not None:
            return known.run_id
        if sampler_id in self._runs:
            run_id = self._runs[sampler_id]
        else:
            run_id = (await asyncio.to_thread(self._read, sampler_id)).run_id
        _keep(self._runs, sampler_id, run_id)
        return run_id

    def moved(self, run_id: str, adapter_ref: str) -> None:
        """The inflight samplers of a run use these weights from now on."""
        self._moves += 1
        for sampler_id, facts in self._known.items():
            if facts.inflight and facts.run_id == run_id:
                self._known[sampler_id] = replace(facts, adapter_ref=adapter_ref)

    def _read(self, sampler_id: str) -> SamplerFacts:
        with self._database.read() as session:
            row = session.get_one(tables.Sampler, sampler_id)
            return SamplerFacts(row.org_id, row.base_model, row.adapter_ref, row.run_id, row.kind == "inflight")


def _keep(known: OrderedDict[str, V], sampler_id: str, value: V) -> None:
    known[sampler_id] = value
    known.move_to_end(sampler_id)
    if len(known) > MOST:
        known.popitem(last=False)
