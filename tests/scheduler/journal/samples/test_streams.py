"""Streams of tokens in the memory of one process."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.journal.samples import streams as module
from scheduler.journal.samples.streams import LocalStreams
from scheduler.links.messages import Drawn, DrawnTokens


def test_who_follows_is_told_however_many_others_are_followed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample may wait long for its first token, and anybody may follow thousands of samples of their own."""
    monkeypatch.setattr(module, "MAX_STREAMS", 3)

    async def story() -> None:
        made = LocalStreams()
        mine = await made.follow("mine")
        changed = mine.changed
        for number in range(10):
            await made.follow(f"another's {number}")
        made.hear(Drawn("mine", [DrawnTokens(0, 0, [7, 8], [-1.0, -2.0], [0, 0])]))
        assert changed.is_set()
        assert [part.tokens for part in mine.beyond({})] == [[7, 8]]
        assert await made.follow("mine") is mine
        made.forget("mine")
        assert (await made.follow("another's 0")).beyond({}) == []

    asyncio.run(story())


def test_what_nobody_follows_is_forgotten_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STREAMS", 3)

    async def story() -> None:
        made = LocalStreams()
        for number in range(4):
            made.hear(Drawn(str(number), [DrawnTokens(0, 0, [number], [-1.0], [0])]))
        assert (await made.follow("0")).beyond({}) == []
        assert [part.tokens for part in (await made.follow("3")).beyond({})] == [[3]]

    asyncio.run(story())
