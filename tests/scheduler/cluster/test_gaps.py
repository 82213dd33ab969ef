"""A number that never comes is given up for all replicas, and for the next leader."""

from __future__ import annotations

import pytest

from scheduler.journal import gaps
from scheduler.order.operations import Outcome, SequenceReused
from store.blobs.folder import FolderBlobs
from tests.scheduler.cluster.replicas import Play, Replica, trainer
from tests.scheduler.journal.kit import RUN, create, run_row, train
from tests.waiting import until_async


@pytest.mark.parametrize("lost", ["nobody", "the leader"])
def test_a_run_goes_on_without_what_never_came(
    play: Play, url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(gaps, "GAP_LASTS_S", 0.2)

    async def scenario(one: Replica, two: Replica) -> None:
        await one.lead()
        async with trainer(url, blobs) as given:
            ids = [await two.journal.accept(create(), run_row())]
            assert (await two.result(ids[0])).error is None
            ids = [await two.journal.accept(train(3)), await one.journal.accept(train(5))]
            if lost == "the leader":
                await until_async(lambda: one.leadership.term.journal.training.runs[RUN].parked)  # type: ignore[union-attr]
                await one.leadership.stop(0.1)
                await two.lead()
            assert [await two.result(id) for id in ids] == [Outcome(b"result", "application/x-protobuf")] * 2
            for replica in (one, two):
                for seq in (1, 2, 4):
                    assert await replica.journal.taken(RUN, seq)
                    with pytest.raises(SequenceReused, match="comes too late"):
                        await replica.journal.accept(train(seq))
            assert (await one.result(await two.journal.accept(train(6)))).error is None
        assert [seq for seq, replay in given if not replay and seq > 0] == [3, 5, 6]

    play(scenario)
