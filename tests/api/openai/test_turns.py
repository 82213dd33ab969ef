"""A sample under a client's own session id is stored before it is answered."""

from __future__ import annotations

import errno
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select
from weft.wire.binary.sample_codec import SequenceResult, encode_sample_response

from store import tables
from store.blobs.folder import FolderBlobs
from tests.api.conftest import MODEL, World


def test_a_sample_that_is_billed_is_answered_once_its_turn_can_be_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the disk is full: a client that is told to send the request again would pay twice."""
    put, refused = FolderBlobs.put, list[str]()

    def full(blobs: FolderBlobs, ref: str, data: bytes) -> None:
        if ref.startswith("turns/") and len(refused) < 2:
            refused.append(ref)
            raise OSError(errno.ENOSPC, "No space left on device")
        put(blobs, ref, data)

    monkeypatch.setattr(FolderBlobs, "put", full)
    asked = {"model": MODEL, "prompt": [1, 2], "max_tokens": 4}
    headers = {"x-api-key": world.key, "x-session-id": "mine"}
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(world.http.post, "/v1/completions", json=asked, headers=headers)
        drawn = SequenceResult(np.array([3, 4], np.int32), np.full(2, -1, np.float32), "stop")
        world.finish(_queued(world), encode_sample_response([drawn]), prefill=2, sample=2)
        reply = coming.result(30)
    assert (reply.status_code, len(refused)) == (200, 2), reply.text
    assert [turn["tokens"] for turn in world.get("weft/turns/mine")["turns"]] == [[3, 4]]


def _queued(world: World) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with world.database.read() as session:
            found: Any = session.scalar(select(tables.Operation.id).filter_by(state="queued"))
        if found:
            return str(found)
        time.sleep(0.01)
    raise AssertionError("nothing was accepted")
