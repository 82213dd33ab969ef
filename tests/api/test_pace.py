"""Requests that come at the same moment are begun a few at a time, organisations taking turns; probes do not wait."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from starlette.types import Receive, Scope, Send

from api.http.pace import EACH_TURN, Pace

MANY = 100


async def nothing(_message: Any = None) -> Any:
    return None


class Begun:
    """The requests that have begun, in order, and the turn of the event loop in which each did."""

    def __init__(self) -> None:
        self.turn, self.order = 0, list[tuple[int, str]]()
        known = {
            hashlib.sha256(name.encode()).hexdigest(): name.partition("-")[0]
            for name in ("acme-1", "acme-2", "rival-1")
        }
        self.pace = Pace(self._app, known.get)

    async def _app(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        self.order.append((self.turn, scope["name"]))
        await asyncio.sleep(0)

    async def watch(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    def ask(self, name: str, key: str = "", path: str = "/x", address: str = "1.1.1.1", bearer: bool = False) -> Any:
        header = (b"authorization", f"Bearer {key}".encode()) if bearer else (b"x-api-key", key.encode())
        scope = {"type": "http", "path": path, "headers": [header], "client": (address, 1), "name": name}
        return asyncio.ensure_future(self.pace(scope, nothing, nothing))

    @property
    def names(self) -> list[str]:
        return [name for _, name in self.order]


def run(story: Any) -> Begun:
    async def main() -> Begun:
        begun = Begun()
        watching = asyncio.ensure_future(begun.watch())
        await story(begun)
        watching.cancel()
        return begun

    return asyncio.run(main())


def test_a_few_begin_in_a_turn_and_all_begin() -> None:
    async def story(begun: Begun) -> None:
        await asyncio.gather(*(begun.ask("acme", "acme-1") for _ in range(MANY)))
        await asyncio.gather(begun.ask("later", "acme-1"))

    begun = run(story)
    turns = [turn for turn, _ in begun.order]
    assert len(turns) == MANY + 1
    assert max(turns.count(turn) for turn in turns) == EACH_TURN
    assert turns[MANY - 1] - turns[0] <= -(-MANY // EACH_TURN), "no turn is left out"


def test_each_organisation_in_turn_whatever_their_keys() -> None:
    async def story(begun: Begun) -> None:
        many = [begun.ask("acme", f"acme-{1 + number % 2}", bearer=number % 3 == 0) for number in range(MANY)]
        few = [begun.ask("rival", "rival-1") for _ in range(3)]
        await asyncio.gather(*many, *few)

    assert run(story).names[EACH_TURN : EACH_TURN + 6] == ["acme", "rival"] * 3


def test_inventing_keys_gains_nothing() -> None:
    async def story(begun: Begun) -> None:
        many = [begun.ask("nobody", f"invented-{number}") for number in range(MANY)]
        few = [begun.ask("elsewhere", "new", address="2.2.2.2"), begun.ask("rival", "rival-1")]
        await asyncio.gather(*many, *few)

    assert run(story).names[EACH_TURN : EACH_TURN + 3] == ["nobody", "elsewhere", "rival"]


def test_probes_wait_for_nobody() -> None:
    async def story(begun: Begun) -> None:
        many = [begun.ask("acme", "acme-1") for _ in range(MANY)]
        await asyncio.gather(*many, begun.ask("probe", path="/healthz"))

    assert run(story).names[EACH_TURN] == "probe"


def test_nobody_holds_up_the_probes_of_others_or_requests_with_many() -> None:
    async def story(begun: Begun) -> None:
        floods = [begun.ask("flood", path="/healthz", address=f"1.1.1.{number % 3}") for number in range(MANY)]
        others = [begun.ask("probe", path="/healthz", address="2.2.2.2"), begun.ask("acme", "acme-1")]
        await asyncio.gather(*floods, *others)

    begun = run(story)
    assert begun.names[: EACH_TURN + 1] == ["flood"] * EACH_TURN + ["acme"]
    assert "probe" in begun.names[EACH_TURN + 1 : 2 * EACH_TURN + 1]
    turns = [turn for turn, _ in begun.order]
    assert max(turns.count(turn) for turn in turns) == EACH_TURN + 1


def test_who_has_left_takes_no_turn() -> None:
    async def story(begun: Begun) -> None:
        many = [begun.ask("acme", "acme-1") for _ in range(MANY)]
        await asyncio.sleep(0)
        for left in many[EACH_TURN:]:
            left.cancel()
        await begun.ask("rival", "rival-1")

    begun = run(story)
    assert begun.names == ["acme"] * EACH_TURN + ["rival"]
    assert begun.order[-1][0] - begun.order[0][0] <= 2
