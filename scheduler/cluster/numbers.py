"""Whether sequence numbers of runs and samplers have been taken. A replica does not know what the others accepted, so
it asks the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, select, text, tuple_

from store import tables
from store.database.bulk import among
from store.database.db import Database

#: (lane, seq)
Key = tuple[str, int]

_OP = tables.Operation.__table__
_TAKEN = text(
    "SELECT lane, seq FROM operations JOIN unnest(CAST(:lanes AS text[]), CAST(:seqs AS bigint[])) "
    "AS asked (lane, seq) USING (lane, seq)"
)


def _live(chosen: ColumnElement[bool]) -> Select[Any]:
    run, owner = tables.Run, tables.Session
    runs = select(run.id).join(owner, owner.id == run.session_id)
    return runs.where(chosen, run.state == "live", owner.state == "active")


_LIVE = {dialect: _live(chosen) for dialect, chosen in among(tables.Run.__table__.c.id, "runs").items()}


@dataclass(frozen=True)
class Number:
    """`taken`: an operation was accepted under it. `run_open`: its lane is a run that takes operations."""

    taken: bool
    run_open: bool


def numbers_of(database: Database, keys: Sequence[Key]) -> list[Number]:
    """The facts about each key, in the order of `keys`."""
    lanes, seqs = [lane for lane, _ in keys], [seq for _, seq in keys]
    with database.ask() as connection:
        if connection.dialect.name == "postgresql":
            taken = connection.execute(_TAKEN, {"lanes": lanes, "seqs": seqs})
        else:
            taken = connection.execute(select(_OP.c.lane, _OP.c.seq).where(tuple_(_OP.c.lane, _OP.c.seq).in_(keys)))
        known = {tuple(found) for found in taken}
        live = set(connection.scalars(_LIVE[connection.dialect.name], {"runs": sorted(set(lanes))}))
    return [Number(key in known, key[0] in live) for key in keys]
