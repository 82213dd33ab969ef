"""Results in memory: bounded in bytes, in total and for each organisation; the others are read again."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st
from sqlalchemy.orm import Session

from scheduler.journal.ending.outcomes import RECENT_BYTES_PER_ORG, Answers, _Recent, payload_of, result_ref, text_of
from scheduler.journal.rows import SMALL_BYTES
from scheduler.links.messages import Done
from scheduler.order.operations import Gone, Operation, Outcome
from scheduler.order.plans import BODY_ONLY
from store import tables
from store.blobs.contract import Blobs
from store.blobs.folder import FolderBlobs
from store.database.db import Database, Transactions
from tests.scheduler.journal.kit import Service, go, sample


def ended(id: str, org: str, size: int) -> Operation:
    op = Operation(id, org, "s", "l", 0, "sample", "m", 0, "", BODY_ONLY, datetime.now(UTC))
    op.outcome = Outcome(b"x" * size)
    return op


def answers(most: int = 50, most_bytes: int = 1000, of_one: int = 300) -> Answers:
    return Answers(cast(Transactions, None), cast(Blobs, None), most, most_bytes, of_one)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400)), max_size=120))
def test_no_limit_is_passed_and_the_latest_of_each_that_fit_stay(made: list[tuple[int, int]]) -> None:
    kept = answers()
    ops = [ended(f"op{n}", f"o{org}", size) for n, (org, size) in enumerate(made)]
    for op in ops:
        kept.remember(op)
    held = [op for op in ops if kept.recent(op.id) is not None]
    sizes: defaultdict[str, int] = defaultdict(int)
    for op in held:
        assert op.outcome is not None
        sizes[op.org_id] += len(op.outcome.payload)
    assert len(held) <= 50
    assert sum(sizes.values()) <= 1000
    assert all(size <= 300 for size in sizes.values())
    for org in {op.org_id for op in ops}:  # what was dropped is older than what stayed
        own = [kept.recent(op.id) is not None for op in ops if op.org_id == org]
        assert own == sorted(own)


def test_large_results_of_one_push_out_nobody_else_s() -> None:
    kept = answers()
    kept.remember(ended("small", "quiet", 10))
    for n in range(200):
        kept.remember(ended(f"large{n}", "flood", 299))
    assert kept.recent("small") is not None
    assert kept.recent("large199") is not None
    assert kept.recent("large198") is None


@pytest.mark.parametrize("limits", [(4096, 1 << 30), (1 << 30, 4096 * 256)], ids=["number", "bytes"])
def test_beyond_a_limit_all_organisations_are_looked_at_for_many_results(limits: tuple[int, int]) -> None:
    """By counting: thousands of organisations, whose results come in turn, and are as many as are kept."""
    kept, organisations = _Recent(*limits, 1 << 30), 4096
    kept._sizes, kept.bytes_of = _CountedSizes(OrderedDict), _CountedBytes()
    for n in range(3 * organisations):
        kept.add(ended(f"op{n}", f"o{n % organisations}", 256))
    assert 4096 - 4096 // 16 <= len(kept) <= 4096
    assert kept._sizes.looked + kept.bytes_of.looked < 32 * 3 * organisations


class _CountedSizes(defaultdict[str, OrderedDict[str, int]]):
    looked = 0

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.looked += 1
            yield name


class _CountedBytes(Counter[str]):
    looked = 0

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.looked += 1
            yield name


@pytest.mark.parametrize(
    ("payload", "kind", "text"),
    [
        (b'{"a":1}', "application/json", '{"a":1}'),
        (b" " * SMALL_BYTES, "application/json", " " * SMALL_BYTES),
        (b" " * (SMALL_BYTES + 1), "application/json", None),
        ("\u00fc".encode(), "application/json", None),
        (b"\0\xff", "application/x-protobuf", "AP8="),
        (b"{}", "application/a", "e30="),  # whether it sorts before JSON or after
        (bytes(SMALL_BYTES + 1), "application/x-protobuf", None),
    ],
    ids=["json", "largest", "too large", "not ascii", "binary", "sorts before", "large binary"],
)
def test_what_is_small_lies_in_a_row_and_is_read_as_it_was(payload: bytes, kind: str, text: str | None) -> None:
    assert text_of(Outcome(payload, kind)) == text
    assert text_of(Outcome(payload, kind, error="it has failed")) is None
    if text is not None:
        assert payload_of(text, kind) == payload


def test_results_are_their_own_organisation_s_alone(database: Database, tmp_path: Path) -> None:
    """Whatever sorts before and after it: only its own are dropped from memory, and stored ones are given to nobody
    else. Blobs of samples are deleted once fetched; others are needed for replays."""
    blobs, now = FolderBlobs(tmp_path), datetime.now(UTC)
    blobs.put("results/la/large", b"large")

    def write(session: Session) -> None:
        columns: dict[str, Any] = {"session_id": "s", "lane": "l", "kind": "sample", "base_model": "m", "tokens": 0}
        columns |= {"body_ref": "", "body_sha256": "", "plan": {}, "accepted_at": now, "org_id": "m"}
        stored: dict[str, dict[str, Any]] = {
            "refused": {"state": "failed", "error": "why", "error_category": "user"},
            "broken": {"state": "failed", "error": "why"},
            "small": {"state": "done", "result": "{}", "result_type": "application/json"},
            "binary": {"state": "done", "result": "AP8=", "result_type": "application/x-protobuf"},
            "large": {"state": "done", "result_ref": "results/la/large", "result_type": "application/x-protobuf"},
            "plain": {"state": "done", "result_ref": "results/la/large"},
            "gone": {"state": "done", "result_ref": "results/no/thing"},
            "given": {"state": "done"},
            "queued": {"state": "queued"},
        }
        session.add(tables.Organisation(id="m", name="m", created_at=now))
        session.flush()
        for seq, (name, of) in enumerate(stored.items()):
            session.add(tables.Operation(id=name, seq=seq, **columns, **of))

    database.write_now(write)
    kept = Answers(database, blobs)
    names = ("refused", "broken", "small", "binary", "large", "plain", "gone", "given", "queued", "nothing")
    for other in ("a", "z"):
        assert [kept.stored(other, name) for name in names] == [None] * len(names)
    assert [kept.stored("m", name) for name in names] == [
        Outcome(error="why", category="user"),
        Outcome(error="why", category="server"),
        Outcome(b"{}"),
        Outcome(b"\0\xff", "application/x-protobuf"),
        Outcome(b"large", "application/x-protobuf"),
        Outcome(b"large"),
        *(Gone(), Gone(), None, None),
    ]
    ops = [ended(f"{org}{size}", org, size) for org in ("a", "m", "z") for size in (1, SMALL_BYTES + 1)]
    trained = ended("trained", "m", SMALL_BYTES + 1)
    trained.kind = "forward_backward"
    for op in (*ops, trained):
        kept.remember(op)
    large = f"m{SMALL_BYTES + 1}"
    assert kept.retrieved("m", [*(op.id for op in ops), trained.id, "nobody's"]) == [result_ref(large)]
    assert [op.id for op in (*ops, trained) if kept.recent(op.id) is None] == ["m1", large, "trained"]


def test_of_all_the_oldest_of_who_has_most_go_until_a_sixteenth_is_free() -> None:
    """An error counts with its length."""
    kept = _Recent(50, 1600, 1000)
    for org, count in (("little", 3), ("much", 9), ("some", 4)):
        for n in range(count):
            op = ended(f"{org}{n}", org, 60)
            op.outcome = Outcome(bytes(60), error="x" * 40)
            kept.add(op)
    assert (len(kept), dict(kept.bytes_of)) == (16, {"little": 300, "much": 900, "some": 400})
    kept.add(ended("one more", "little", 1))
    assert dict(kept.bytes_of) == {"little": 301, "much": 700, "some": 400}  # 1401: at most 1500 are left
    assert [kept.get(f"much{n}") is None for n in range(3)] == [True, True, False]


def test_what_does_not_fit_is_read_again(folder: Path) -> None:
    """Samples of 9 MB each, with top-k log-probabilities: of forty that nobody has fetched, three are in memory."""
    size = 9 << 20

    async def scenario() -> None:
        service = Service(folder)
        journal = service.journal
        ids = [await journal.accept(sample(seq)) for seq in range(40)]
        for n, id in enumerate(ids):
            journal.finish(Done(id, bytes([n]) * size, {"sample": 1}))
            await journal.flush()
        held = [op for op in map(journal.answers.recent, ids) if op is not None]
        assert 0 < len(held) * size <= RECENT_BYTES_PER_ORG
        for n, id in enumerate(ids):
            found = await journal.outcome("org", id, 1)
            assert isinstance(found, Outcome)
            assert bool(found.ref) == (ids[n] not in {op.id for op in held})  # read when there is room for it
            found = journal.answers.whole(found)
            assert isinstance(found, Outcome)
            assert (len(found.payload), found.payload[:1], found.error) == (size, bytes([n]), None)
        journal.answers.retrieved("org", ids[-1:])
        assert journal.answers.recent(ids[-1]) is None
        service.blobs.delete(f"results/{ids[0][:2]}/{ids[0]}")
        gone = await journal.outcome("org", ids[0], 1)
        assert isinstance(gone, Outcome)
        assert isinstance(journal.answers.whole(gone), Gone)
        assert await journal.outcome("other", ids[1], 1) is None
        service.database.close()

    go(scenario())
