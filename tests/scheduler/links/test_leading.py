"""Workers of another version than their leader's."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from scheduler.links import leading, redis_queue, sample_link as sample_links, train_link
from scheduler.links.messages import FORM, PullSamples, TrainOp, form_of
from scheduler.links.redis_queue import SAMPLES, RedisQueue
from scheduler.links.sample_link import SampleLink
from scheduler.links.train_link import Joining, TrainerLink
from store.blobs.folder import FolderBlobs
from tests.scheduler.links.samples import push
from tests.waiting import until


def test_workers_of_another_version_get_nothing_and_say_so(
    url: str, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They would not know all fields of a message, such as one not to take a step."""
    joining, newer = Joining(url, "token"), RedisQueue(url)
    joining.lead(60)
    push(newer, "s")
    older = msgspec.defstruct("TrainOp", [("op_id", str), ("run_id", str)])
    other = form_of([older], [])
    assert other not in (FORM, form_of([TrainOp], []), form_of([older], ["create"]))
    theirs = SAMPLES.replace(FORM, other)
    with monkeypatch.context() as patch:
        for link in (train_link, redis_queue):
            patch.setattr(link, "LEADER", leading.LEADER.replace(FORM, other))
        patch.setattr(train_link, "TRAINERS", leading.TRAINERS.replace(FORM, other))
        patch.setattr(sample_links, "RedisQueue", partial(RedisQueue, name=theirs))
        patch.setattr(sample_links, "BEAT_S", 0.01)
        patch.setattr(leading, "LATE_S", 0.0)
        with pytest.raises(EOFError, match="before there was a leader"):
            TrainerLink(url, blobs, iter([False, False, True]).__next__)
        generator = SampleLink(url, blobs)
        generator.send(PullSamples(["m"], 2))
        assert until(lambda: len(caplog.records) == 2 and newer.strangers() == [generator.name])
        generator.close()
    assert [record.message for record in caplog.records] == 2 * [leading.NO_LEADER]
    assert joining.next(0.1) is None
    generators = RedisQueue(url, theirs)
    assert generators.lease("generator", ["m"], 2, 60) == []
    assert [lease.id for lease in newer.lease("generator", ["m"], 2, 60)] == ["s"]
    for end in (joining, newer, generators):
        end.close()
