"""What is kept in memory of results: bounded in bytes, of all and of each organisation; the rest is read again."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.journal.ending.outcomes import RECENT_BYTES_PER_ORG, Answers, _Recent
from scheduler.links.messages import Done
from scheduler.order.operations import Gone, Operation, Outcome
from scheduler.order.plans import BODY_ONLY
from store.blobs.folder import FolderBlobs
from store.database.db import Transactions
from tests.scheduler.journal.test_journal import Service, folder, go, sample  # noqa: F401


def ended(id: str, org: str, size: int) -> Operation:
    op = Operation(id, org, "s", "l", 0, "sample", "m", 0, "", BODY_ONLY, datetime.now(UTC))
    op.outcome = Outcome(bytes(size))
    return op


def answers(most: int = 50, most_bytes: int = 1000, of_one: int = 300) -> Answers:
    return Answers(cast(Transactions, None), FolderBlobs(Path("nowhere")), most, most_bytes, of_one)


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
    for org in {op.org_id for op in ops}:  # what went is older than what stayed
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


def test_what_does_not_fit_is_read_again(folder: Path) -> None:  # noqa: F811
    """Samples with top-k log-probabilities, of 9 MB each: of forty that nobody has fetched yet, three are in memory."""
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
            assert (len(found.payload), found.payload[:1], found.error) == (size, bytes([n]), None)
        journal.answers.retrieved("org", ids[-1:])
        assert journal.answers.recent(ids[-1]) is None
        service.blobs.delete(f"results/{ids[0][:2]}/{ids[0]}")
        assert isinstance(await journal.outcome("org", ids[0], 1), Gone)
        assert await journal.outcome("other", ids[1], 1) is None
        service.database.close()

    go(scenario())
