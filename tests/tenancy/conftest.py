"""The API on either database (`any_world`), and the table of its routes, from which other tests are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

import pytest
from fastapi import FastAPI

from api.http.access import Access, declared
from api.http.auth import KeyCache
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from store.people import organisations
from store.people.keys import new_key
from store.settings import Settings
from store.tables import Organisation
from tests.api.conftest import World, card, open_world, settings
from workers.model.card import ModelCard

__all__ = ["card", "settings"]


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    access: Access | None
    answer: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def routes_of(app: FastAPI) -> list[Route]:
    """All routes of the app. Fails the test if anything else is mounted."""
    found: list[Route] = []
    route: Any
    for route in app.routes:
        answer = get_type_hints(route.endpoint).get("return")
        found.extend(Route(method, route.path, declared(route), answer) for method in sorted(route.methods))
    return found


@pytest.fixture
def any_world(settings: Settings, card: ModelCard, any_database: Database, blobs: FolderBlobs) -> Iterator[World]:
    with open_world(settings, card, any_database, blobs) as world:
        yield world


@pytest.fixture
def world(settings: Settings, card: ModelCard, database: Database, blobs: FolderBlobs) -> Iterator[World]:
    with open_world(settings, card, database, blobs) as world:
        yield world


def org_id_of(world: World) -> str:
    with world.database.read() as session:
        return session.query(Organisation).filter_by(name="acme").one().id


def member(world: World, role: str, email: str | None = None, **options: Any) -> tuple[str, str]:
    """Add a member to acme: the user's id and a key."""
    org_id = org_id_of(world)

    def write(session: Any) -> tuple[str, str]:
        user = organisations.add_member(session, org_id, email or f"{role}@example.com", role)
        return user.id, new_key(session, org_id, user_id=user.id, **options)[1]

    return world.database.write_now(write)


def forget_keys(world: World) -> None:
    """Let the seconds pass for which keys are remembered."""
    world.http.app.state.keys = KeyCache()  # type: ignore[attr-defined]
