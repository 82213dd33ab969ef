"""Two replicas make the same change at the same moment: one succeeds, and the other's client is told so. On PostgreSQL,
because a SQLite database has only one writer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from api.console.pages.people.sso import _enter
from api.errors import Forbidden
from api.oidc.flow import Flow
from api.routes.people import keys
from api.who.inviting import join
from store.blobs.folder import FolderBlobs
from store.database.db import Database
from store.people.identities import Account
from store.people.oidc_settings import GroupRole, OidcSettings
from store.people.organisations import PeopleError, organisation_named, user_with
from store.settings import Settings
from tests.api.conftest import World, open_world
from tests.tenancy.conftest import member
from workers.model.card import ModelCard

ROUNDS = 20


@pytest.fixture
def replicas(
    settings: Settings, card: ModelCard, postgres_database: Database, blobs: FolderBlobs
) -> Iterator[tuple[World, World]]:
    """Two servers on one database."""
    other = Database(postgres_database.url)
    with (
        open_world(settings, card, postgres_database, blobs) as one,
        open_world(settings, card, other, blobs) as two,
    ):
        yield one, two
    other.close()


def both(*asks: Callable[[], Any]) -> list[Any]:
    """The answers of both, asked at the same moment."""
    answers: list[Any] = [None] * len(asks)
    begin = threading.Barrier(len(asks))

    def ask(number: int) -> None:
        begin.wait(30)
        answers[number] = asks[number]()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def ask(replicas: tuple[World, World], method: str, path: str, body: Any) -> list[int]:
    """The two statuses, sorted, when both are asked the same."""
    replies = both(*(partial(world.call, method, path, json=body) for world in replicas))
    return sorted(reply.status_code for reply in replies)


def test_a_project_is_made_once(replicas: tuple[World, World]) -> None:
    for number in range(ROUNDS):
        assert ask(replicas, "POST", "weft/projects", {"name": f"p{number}"}) == [200, 400]


def test_two_projects_of_one_name(replicas: tuple[World, World]) -> None:
    for number in range(ROUNDS):
        ids = [
            world.post("weft/projects", {"name": f"{number}{id}"})["id"]
            for world, id in zip(replicas, "ab", strict=True)
        ]
        renamed = {"name": f"n{number}"}
        calls = [
            partial(world.call, "PATCH", f"weft/projects/{id}", json=renamed)
            for world, id in zip(replicas, ids, strict=True)
        ]
        assert sorted(reply.status_code for reply in both(*calls)) == [200, 400]


def test_a_project_that_sessions_are_moved_to(replicas: tuple[World, World]) -> None:
    paths = [f"sessions/{world.session()}/project" for world in replicas]
    for number in range(ROUNDS):
        moved = {"project_id": f"p{number}"}
        calls = [partial(world.call, "PUT", path, json=moved) for world, path in zip(replicas, paths, strict=True)]
        assert [reply.status_code for reply in both(*calls)] == [200, 200]


def test_a_member(replicas: tuple[World, World]) -> None:
    for number in range(ROUNDS):
        body = {"email": f"p{number}@corp.example", "role": "member"}
        assert ask(replicas, "POST", "weft/members", body) == [200, 400]


def test_a_member_who_leaves(replicas: tuple[World, World]) -> None:
    for number in range(ROUNDS):
        user_id, _ = member(replicas[0], "member", f"p{number}@corp.example")
        assert ask(replicas, "DELETE", f"weft/members/{user_id}", None) == [200, 404]


def test_a_person_whom_two_organisations_add(replicas: tuple[World, World]) -> None:
    adding = [(replicas[0], replicas[0].key), (replicas[1], replicas[1].other_key)]
    for number in range(ROUNDS):
        body = {"email": f"p{number}@corp.example", "role": "member"}
        add = [partial(world.call, "POST", "weft/members", key=key, json=body) for world, key in adding]
        replies = both(*add)
        assert [reply.status_code for reply in replies] == [200, 200]
        assert replies[0].json()["user_id"] == replies[1].json()["user_id"]


def sign_in(world: World, account: Account) -> str:
    """How a sign-in ends for an account that the provider has just proved: they are in, or the reason why not."""
    rule = GroupRole(group="all", organisation="acme", role="member")
    settings = world.service.settings.model_copy(update={"oidc": OidcSettings(groups=[rule])})
    service: Any = SimpleNamespace(database=world.database, settings=settings)
    request = Request({"type": "http", "scheme": "http", "path": "/", "query_string": b"", "headers": []})
    try:
        entered = asyncio.run(_enter(request, service, Flow("", "", "", "/"), account))
    except PeopleError as error:
        return str(error)
    return "in" if entered.sid is not None else entered.says


@pytest.mark.parametrize("accounts", ["one", "two"])
def test_somebody_who_signs_in_for_the_first_time(replicas: tuple[World, World], accounts: str) -> None:
    """In two tabs; or by two accounts with the same address, of which one is refused."""
    for number in range(ROUNDS):
        subjects = [str(number), str(number) if accounts == "one" else f"{number}b"]
        account = Account("https://idp.example", "", f"p{number}@corp.example", frozenset({"all"}))
        tabs = [
            partial(sign_in, world, replace(account, subject=subject))
            for world, subject in zip(replicas, subjects, strict=True)
        ]
        first, second = sorted(both(*tabs))
        assert first == "in"
        assert second == "in" if accounts == "one" else "belongs to another account" in second


def test_somebody_who_signs_in_while_they_are_made_a_member(replicas: tuple[World, World]) -> None:
    """A person whom another organisation knows: the sign-in waits for the change that makes them a member here."""
    for number in range(ROUNDS):
        body = {"email": f"p{number}@corp.example", "role": "member"}
        replicas[0].database.write_now(partial(user_with, email=body["email"]))
        account = Account("https://idp.example", f"s{number}", body["email"], frozenset({"all"}))
        add = partial(replicas[0].call, "POST", "weft/members", json=body)
        added, entered = both(add, partial(sign_in, replicas[1], account))
        assert entered == "in"
        assert added.status_code in (200, 400), added.text


def test_an_invitation_that_is_used_in_two_tabs(replicas: tuple[World, World]) -> None:
    now = datetime.now(UTC)
    for number in range(ROUNDS):
        body = {"role": "member", "days": 1, "email": f"p{number}@corp.example"}
        secret = replicas[0].post("weft/invitations", body)["link"].rsplit("/", 1)[1]
        replicas[0].database.write_now(partial(user_with, email=body["email"]))

        def use(world: World, secret: str = secret, email: Any = body["email"]) -> str:
            try:
                world.database.write_now(lambda session: join(session, secret, user_with(session, email), now))
            except (Forbidden, PeopleError):
                return "refused"
            return "member"

        assert sorted(both(*(partial(use, world) for world in replicas))) == ["member", "refused"]


def test_an_organisation_that_two_commands_make(replicas: tuple[World, World]) -> None:
    for number in range(ROUNDS):
        make = partial(organisation_named, name=f"o{number}")
        first, second = both(*(partial(world.database.write_now, make) for world in replicas))
        assert first.id == second.id


def test_the_last_key_that_there_is_room_for(replicas: tuple[World, World], monkeypatch: pytest.MonkeyPatch) -> None:
    user_id, _ = member(replicas[0], "member")
    for number in range(ROUNDS):
        monkeypatch.setattr(keys, "MAX_KEYS_OF_A_MEMBER", number + 2)
        assert ask(replicas, "POST", "weft/keys", {"user_id": user_id, "scopes": ["sample"]}) == [200, 400]


def test_another_secret(replicas: tuple[World, World]) -> None:
    """Anyone who was given a secret can use it: neither secret is lost to the other."""
    made = replicas[0].post("weft/keys", {"scopes": ["sample"]})
    for _ in range(ROUNDS):
        for given in both(*(partial(world.post, f"weft/keys/{made['id']}/rotate", {}) for world in replicas)):
            replicas[0].get("weft/limits", key=given["key"])


def test_the_last_two_owners(replicas: tuple[World, World]) -> None:
    """Each replica removes another owner: one owner stays."""
    first, _ = member(replicas[0], "owner", "first@corp.example")
    for number in range(ROUNDS):
        second, _ = member(replicas[0], "owner", f"p{number}@corp.example")
        paths = [f"weft/members/{user_id}" for user_id in (first, second)]
        calls = [partial(world.call, "DELETE", path) for world, path in zip(replicas, paths, strict=True)]
        statuses = [reply.status_code for reply in both(*calls)]
        assert sorted(statuses) == [200, 400]
        first = first if statuses[0] == 400 else second
