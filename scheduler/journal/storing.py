"""Storing what must be stored, however often it takes.

A disk that is full, or a database that is away, delays; it never makes something fail that was computed already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

T = TypeVar("T")

#: The first and the longest pause before another attempt.
AGAIN_S = (0.1, 5.0)
#: What a database says when a statement is wrong, not the moment: asking again would not help.
WRONG = (IntegrityError, DataError, ProgrammingError)


class Unrecorded(Exception):
    """Something cannot be written down, however often it is tried."""


async def until_stored(attempt: Callable[[], Awaitable[T]], refused: Callable[[Exception, float], None]) -> T:
    """What `attempt` returns, tried again while disk or database do not answer; `refused` hears of each failure and of
    the pause after it. An attempt that failed may have taken effect all the same. Raises Unrecorded."""
    pause_s = AGAIN_S[0]
    while True:
        try:
            return await attempt()
        except WRONG as error:
            raise Unrecorded(str(error)) from error
        except (OSError, DBAPIError, PoolTimeout) as error:
            refused(error, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, AGAIN_S[1])
