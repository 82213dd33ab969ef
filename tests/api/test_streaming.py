"""Reading a sample while it is drawn: each token once, in order, in pieces that let others have their turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from weft.wire.binary.sample_codec import PolicySpan, SampleResult, SequenceResult, TopkLogprobs

from api.operations import streaming
from api.operations.streaming import TOLD_AT_ONCE, DrawnAnew, Waited, rest_of
from api.who.principal import Principal
from scheduler.journal.ending.outcomes import LARGE_BYTES
from scheduler.journal.samples.streams import TokenStream, cut
from scheduler.links.messages import DrawnTokens
from scheduler.order.operations import Outcome

MANY = 3 * TOLD_AT_ONCE + 7


def whole(sample: int) -> DrawnTokens:
    tokens = list(range(MANY))
    tops = [([token], [-0.5]) for token in tokens]
    return DrawnTokens(sample, 0, tokens, [-float(token) for token in tokens], [1] * 5 + [2] * (MANY - 5), tops)


def finished(sample: int) -> SequenceResult:
    """The same tokens as they are in a result."""
    part = whole(sample)
    top = TopkLogprobs(np.array(part.tokens, np.int32)[:, None], np.full((MANY, 1), -0.5, np.float32))
    tokens, logprobs = np.array(part.tokens, np.int32), np.array(part.logprobs, np.float32)
    return SequenceResult(tokens, logprobs, "length", top, (PolicySpan(1, 5), PolicySpan(2, MANY - 5)))


def service_with(stream: TokenStream) -> Any:
    async def follow(request_id: str) -> TokenStream:
        return stream

    return SimpleNamespace(journal=SimpleNamespace(streams=SimpleNamespace(follow=follow)))


@pytest.mark.parametrize("drawn_before", [0, 1, TOLD_AT_ONCE, MANY])
def test_who_comes_late_is_told_in_pieces_and_others_go_on_between(
    drawn_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens drawn before they came, and the rest of the result."""
    result = SampleResult([finished(0), finished(1)])
    stream = TokenStream()
    if drawn_before:
        stream.hear([cut(whole(0), 0, drawn_before)])

    async def sampled(*_: object, **_options: object) -> SampleResult:
        await asyncio.sleep(0)
        return result

    monkeypatch.setattr(Waited, "result", sampled)
    turns = 0

    async def another() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def story() -> None:
        other = asyncio.ensure_future(another())
        told: dict[int, list[DrawnTokens]] = {0: [], 1: []}
        before = -1
        async for part in Waited(service_with(stream), None, "id").drawn():  # type: ignore[arg-type]
            assert turns > before, "nobody else had a turn since the last piece"
            before = turns
            if isinstance(part, DrawnTokens):
                assert 0 < len(part.tokens) <= TOLD_AT_ONCE
                assert part.start == sum(len(each.tokens) for each in told[part.sample])
                told[part.sample].append(part)
            else:
                assert part is result
        other.cancel()
        for sample, parts in told.items():
            for name in ("tokens", "logprobs", "versions", "tops"):
                assert [x for part in parts for x in getattr(part, name)] == getattr(whole(sample), name)

    asyncio.run(story())


def other(start: int, end: int) -> DrawnTokens:
    """The same as `whole` in the first two tokens, and different after."""
    part = cut(whole(0), 0, MANY)
    tokens = [*part.tokens[:2], *(token + 1 for token in part.tokens[2:])]
    return cut(msgspec.structs.replace(part, tokens=tokens, versions=[3] * MANY), start, end)


@pytest.mark.parametrize("told_again", [True, False], ids=["its second draw is heard", "only its result comes"])
def test_tokens_of_two_draws_are_never_told_as_one(told_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator dies, and the next one draws from newer weights: other tokens, though with the same seed."""
    stream, over = TokenStream(), asyncio.Event()
    stream.hear([cut(whole(0), 0, 5)])
    result = SampleResult([SequenceResult(np.array(other(0, MANY).tokens, np.int32), None, "length")])

    async def sampled(*_: object, **_options: object) -> SampleResult:
        await over.wait()
        return result

    monkeypatch.setattr(Waited, "result", sampled)

    told = list[int]()

    async def read() -> None:
        async for part in Waited(service_with(stream), None, "id").drawn():  # type: ignore[arg-type]
            assert isinstance(part, DrawnTokens)
            told.extend(part.tokens)
            if told_again:
                for start, end in ((0, 1), (1, 4), (4, 9)):
                    stream.hear([other(start, end)])
            else:
                over.set()

    async def story() -> None:
        with pytest.raises(DrawnAnew):
            await read()
        assert told == whole(0).tokens[:5]
        if told_again:  # a reader who comes now gets one draw only
            late = Waited(service_with(stream), None, "id").drawn()  # type: ignore[arg-type]
            found = await anext(late)
            assert isinstance(found, DrawnTokens)
            assert found.tokens == other(0, 9).tokens
            await late.aclose()

    asyncio.run(story())


def test_a_result_is_made_into_lists_no_faster_than_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the likeliest tokens of each place, all of it at once would hold the event loop for seconds."""
    made = list[int]()
    real = TopkLogprobs.tolist

    def counted(self: TopkLogprobs) -> Any:
        made.append(len(self.token_ids))
        return real(self)

    monkeypatch.setattr(TopkLogprobs, "tolist", counted)
    first = next(rest_of(0, finished(0), told=MANY - TOLD_AT_ONCE - 1))
    assert (first.start, len(first.tokens), made) == (MANY - TOLD_AT_ONCE - 1, TOLD_AT_ONCE, [TOLD_AT_ONCE])


def test_a_reader_that_leaves_leaves_no_task_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = TokenStream()
    stream.hear([whole(0)])

    async def sampled(*_: object, **_options: object) -> SampleResult:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Waited, "result", sampled)

    async def story() -> None:
        reading = Waited(service_with(stream), None, "id").drawn()  # type: ignore[arg-type]
        assert isinstance(await anext(reading), DrawnTokens)
        await reading.aclose()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(story())


def test_a_large_result_is_read_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte takes tens of milliseconds, and many results may be read at the same moment."""
    readers = list[int]()

    def read(outcome: Outcome, _request_id: str) -> bytes:
        readers.append(threading.get_ident())
        return outcome.payload

    async def ended(*_: object, **_options: object) -> Outcome:
        return outcome

    monkeypatch.setattr(Waited, "ended", ended)
    monkeypatch.setattr(streaming, "result_of", read)

    async def work(size_bytes: int, work: Callable[[], Any]) -> Any:
        assert size_bytes == LARGE_BYTES + 1
        return await asyncio.to_thread(work)

    service: Any = SimpleNamespace(work=work)
    for outcome in (Outcome(bytes(LARGE_BYTES)), Outcome(bytes(LARGE_BYTES + 1))):
        assert asyncio.run(Waited(service, Principal("o", 1), "id").result()) is outcome.payload  # type: ignore[comparison-overlap]
    assert [reader == threading.get_ident() for reader in readers] == [True, False]
