"""The order of one run's operations.

An operation is POSTed only after the one before it was answered, though not before that one is finished; numbers are
given out as operations take their turn, so they have no gaps. An operation that the server refuses has used its number;
one that could not be written, or that nobody has looked at, has not. One whose fate is unknown (never answered) breaks
the lane: the server would wait for it forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from weft.errors import APIStatusError, LaneBrokenError
from weft.transport.retry import is_billing, passes_by_itself

#: Refusals of what an operation says, which use its number though they may not name it. All others name it if they do.
ABOUT_THE_BODY = frozenset({400, 409, 410, 422})


class Turn:
    """The right to submit. `next_seq` numbers the operation to submit now; `sending` says that it leaves, `answered`
    that it was answered."""

    def __init__(self, next_seq: int) -> None:
        self._next = next_seq
        self.unanswered: int | None = None

    def next_seq(self) -> int:
        """The number of the next operation, which must be `answered` before there is another."""
        return self._next

    def sending(self) -> None:
        """From here on the server may have it."""
        self.unanswered = self._next
        self._next += 1

    def unread(self) -> None:
        """It was answered without a look at its number, which is that of the next operation."""
        self._next -= 1
        self.unanswered = None

    def answered(self) -> None:
        """The server has taken, or for good refused, the operation last numbered."""
        self.unanswered = None


class Lane:
    """Turns, first come first served. Runs on the background loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._next = 1
        self._broken_by: BaseException | None = None

    def break_off(self, error: BaseException) -> None:
        """Nothing can be submitted any more."""
        self._broken_by = error

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Wait for the turn. `LaneBrokenError` if an earlier operation was lost."""
        async with self._lock:
            if self._broken_by is not None:
                raise LaneBrokenError(f"not sent, because {self._broken_by}") from self._broken_by
            turn = Turn(self._next)
            try:
                yield turn
            except BaseException as error:
                if turn.unanswered is not None:
                    if is_unread(error):
                        turn.unread()
                    elif not is_refusal(error):
                        self.break_off(error)
                raise
            finally:
                self._next = turn.next_seq()


def is_unread(error: BaseException) -> bool:
    """Whether nobody has looked at the operation's number. A proxy that refuses by itself passes nothing on, and the
    server asks first who it is that sends. Should it have been read after all (some proxies put a page of their own in
    the place of an answer), the number is refused to the next operation, which tells it, and used up with that."""
    if not isinstance(error, APIStatusError) or not is_refusal(error):
        return False
    return error.foreign or (error.status_code not in ABOUT_THE_BODY and error.operation is None)


def is_refusal(error: BaseException) -> bool:
    """Whether the server has said no for good, which uses up the operation's number."""
    if not isinstance(error, APIStatusError):
        return False
    return not passes_by_itself(error.status_code) and not is_billing(error.status_code)
