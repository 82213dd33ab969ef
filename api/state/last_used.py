"""When each key was last used, to the minute: noted in memory, written now and then by housekeeping, so that no request
waits for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from sqlalchemy import or_, update
from sqlalchemy.orm import Session

from store.database.db import Database
from store.tables import ApiKey

#: How long after its last note the use of a key is noted again.
EVERY = timedelta(minutes=1)


class LastUsed:
    """Lives in the event loop."""

    def __init__(self, database: Database, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._database = database
        self._clock = clock
        self._noted: dict[int, datetime] = {}
        self._fresh: dict[int, datetime] = {}

    def note(self, key_id: int) -> None:
        now, before = self._clock(), self._noted.get(key_id)
        if before is None or now - before >= EVERY:
            self._noted[key_id] = self._fresh[key_id] = now

    async def flush(self) -> int:
        """Write what is new. Returns how many keys that were."""
        fresh, self._fresh = self._fresh, {}
        self._noted = {key_id: at for key_id, at in self._noted.items() if self._clock() - at < EVERY}
        if fresh:
            await self._database.write(lambda session: _write(session, fresh))
        return len(fresh)


def _write(session: Session, fresh: dict[int, datetime]) -> None:
    """Write in the order of keys, so that two servers never wait for each other."""
    for key_id, at in sorted(fresh.items()):
        older = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < at)
        session.execute(update(ApiKey).where(ApiKey.id == key_id, older).values(last_used_at=at))
