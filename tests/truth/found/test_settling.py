"""Faults that the model has found in the order in which results become lasting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy.exc import OperationalError

from scheduler.journal import storing
from scheduler.journal.ending.settlement import Ending
from scheduler.links.messages import Done, PullPass
from scheduler.order.plans import Save
from store import tables
from store.database.works import Batch
from tests.scheduler.journal.kit import Service, first_pass, go, organisation, outcome, save


def test_saves_under_one_name_are_settled_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database refuses the first result for a moment. The second must not become lasting before it: the name would
    then stay with the older weights for good."""
    monkeypatch.setattr(storing, "AGAIN_S", (0.02, 0.05))

    async def scenario() -> None:
        service = Service(tmp_path)
        organisation(service)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            saves = [save(seq, "same") for seq in (1, 2)]
            over = [replace(new, plan=Save("weights", "same", overwrite=True)) for new in saves]
            one, two = [await service.journal.accept(new) for new in over]
            pass_ = await service.ask(link, PullPass(["m"]))
            refused, write = list[str](), service.database.write_batched

            async def refusing(batch: Batch, item: Any, *, lock: str) -> Any:
                if isinstance(item, Ending) and item.op.id == one and len(refused) < 3:
                    refused.append(one)
                    raise OperationalError("update", {}, Exception("disk I/O error"))
                return await write(batch, item, lock=lock)

            monkeypatch.setattr(service.database, "write_batched", refusing)
            for op in pass_.ops:
                link.send(Done(op.op_id, b"", {"size_bytes": 1}))
            for request_id in (one, two):
                assert (await outcome(service, request_id)).error is None
            (row,) = service.rows(tables.Checkpoint)
            assert (len(refused), row.ref) == (3, f"weights/{two}")

    go(scenario())
