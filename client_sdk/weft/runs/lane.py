"""The order of one run's operations.

An operation is POSTed only after the one before it was answered, though not before that one is finished; numbers are
given out as operations take their turn, so they have no gaps. An operation that the server refuses has used its number;
one that could not be encoded, or that the server never read, has not. An operation that was sent and never answered
breaks the lane: nobody knows whether the server has it, and without it the server would wait for its number forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from weft.errors import APIStatusError, LaneBrokenError
from weft.transport.retry import is_billing, passes_by_itself

#: Refusals of an operation's content: these use its number even if the answer does not name the operation. Any other
#: refusal that uses the number names it.
ABOUT_THE_BODY = frozenset({400, 409, 410, 422})


class Turn:
    """The right to submit. `next_seq` numbers the operation to submit now. The submitter calls `sending` before it
    sends the request, and `answered` or `unread` after the answer."""

    def __init__(self, next_seq: int) -> None:
        self._next = next_seq
        self.unanswered: int | None = None

    def next_seq(self) -> int:
        """The number of the next operation, which must be `answered` before there is another."""
        return self._next

    def sending(self) -> None:
        """From here on the server may have received the operation."""
        self.unanswered = self._next
        self._next += 1

    def unread(self) -> None:
        """The operation was refused before its number was read: the next operation gets the same number."""
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
        """Break the lane: nothing can be submitted any more."""
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
    """Whether the answer shows that the operation's number was not read: a proxy refused the request, or the server
    refused the credential, which it checks first. If the number was read after all (some proxies replace an answer by a
    page of their own), the server refuses it to the next operation, which reports that and uses it up."""
    if not isinstance(error, APIStatusError) or not is_refusal(error):
        return False
    return error.foreign or (error.status_code not in ABOUT_THE_BODY and error.operation is None)


def is_refusal(error: BaseException) -> bool:
    """True if the server has refused for good, which uses up the operation's number."""
    if not isinstance(error, APIStatusError):
        return False
    return not passes_by_itself(error.status_code) and not is_billing(error.status_code)
