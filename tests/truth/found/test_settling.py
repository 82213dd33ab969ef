"""What the model has found in the order in which results become lasting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.journal import storing
from scheduler.links.messages import Done, PullPass
from scheduler.order.plans import Save
from store import tables
from tests.scheduler.journal.test_journal import Service, first_pass, folder, go, outcome, save  # noqa: F401
from tests.scheduler.journal.test_losses import Disk, until


def test_saves_under_one_name_are_settled_in_their_order(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk refuses the first one's result for a moment. The second one must not become lasting before it: the name
    would then be the older weights' for good."""
    monkeypatch.setattr(storing, "AGAIN_S", (0.02, 0.05))

    async def scenario() -> None:
        service = Service(folder)
        async with service.worker(service.trainer) as link:
            await first_pass(service, link)
            saves = [save(seq, "same") for seq in (1, 2)]
            over = [replace(new, plan=Save("weights", "same", overwrite=True)) for new in saves]
            one, two = [await service.journal.accept(new) for new in over]
            pass_ = await service.ask(link, PullPass(["m"]))
            disk = Disk(monkeypatch, f"results/{one[:2]}/{one}")
            for op in pass_.ops:
                link.send(Done(op.op_id, b"", {"size_bytes": 1}))
            await until(lambda: disk.refused >= 2)
            disk.full = False
            for request_id in (one, two):
                assert (await outcome(service, request_id)).error is None
            (row,) = service.rows(tables.Checkpoint)
            assert row.ref == f"weights/{two}"

    go(scenario())
