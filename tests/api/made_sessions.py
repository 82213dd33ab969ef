"""Sessions that tests make, look at, and let grow old."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import update

from store import tables
from store.database.db import Database
from tests.api.conftest import World
from tests.keys import create_key

NOBODY = {"reason": None, "detail": None, "key_id": None}
FINISHED = {"reason": {"type": "success"}, "detail": None}


def create(world: World, key: str | None = None, **body: Any) -> str:
    reply = world.post("create_session", {"tags": [], "sdk_version": "0.38.0"} | body, key=key)
    return str(reply["session_id"])


def stored(world: World, session_id: str) -> tables.Session:
    with world.database.read() as session:
        return session.get_one(tables.Session, session_id)


def colleague(world: World) -> str:
    """Another key of the same organisation."""
    return world.database.write_now(lambda session: create_key(session, "acme"))


def age(database: Database, session_id: str, hours: float) -> None:
    past = datetime.now(UTC) - timedelta(hours=hours)
    change = update(tables.Session).where(tables.Session.id == session_id).values(last_seen_at=past)
    database.write_now(lambda session: session.execute(change))
