"""What samplers sample from now: the base model, a snapshot, or the newest weights of a run they follow."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from store import tables
from store.database.db import Transactions


@dataclass(frozen=True)
class SamplerFacts:
    org_id: str
    base_model: str
    adapter_ref: str
    run_id: str | None
    inflight: bool


class Samplers:
    """Reads the facts from the database, and remembers them."""

    def __init__(self, database: Transactions, *, runs_move_elsewhere: bool = False) -> None:
        """`runs_move_elsewhere`: other replicas save too, so the weights of what follows a run are looked up."""
        self._database = database
        self._runs_move_elsewhere = runs_move_elsewhere
        self._known: dict[str, SamplerFacts] = {}

    def facts(self, sampler_id: str) -> SamplerFacts:
        known = self._known.get(sampler_id)
        if known is not None and not (known.inflight and self._runs_move_elsewhere):
            return known
        with self._database.read() as session:
            row = session.get_one(tables.Sampler, sampler_id)
            facts = SamplerFacts(row.org_id, row.base_model, row.adapter_ref, row.run_id, row.kind == "inflight")
        self._known[sampler_id] = facts
        return facts

    async def run_of(self, sampler_id: str) -> str | None:
        """What it samples from; that never moves."""
        known = self._known.get(sampler_id)
        return (await asyncio.to_thread(self.facts, sampler_id) if known is None else known).run_id

    def moved(self, run_id: str, adapter_ref: str) -> None:
        """The inflight samplers of a run are on these weights now."""
        for sampler_id, facts in self._known.items():
            if facts.inflight and facts.run_id == run_id:
                self._known[sampler_id] = replace(facts, adapter_ref=adapter_ref)
