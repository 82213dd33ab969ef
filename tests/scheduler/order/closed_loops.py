"""Clients that wait for their answers, at trainers that take passes: a model to compare homes with."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from scheduler.order.homes import Claim, Homes

MODEL = "m"
MOVE_TOKENS = 100


@dataclass(frozen=True)
class Client:
    """Keeps `in_flight` operations of so many tokens in flight; it thinks after an answer before it sends the next."""

    tokens: int
    in_flight: int = 1
    think_s: float = 0.01


@dataclass
class Trainer:
    fixed_s: float = 0.02
    tokens_per_s: float = 10_000.0
    busy: bool = False


@dataclass
class Run:
    client: Client
    queued: deque[int] = field(default_factory=deque)
    outstanding: int = 0
    answered: int = 0


class Loops:
    """A pass takes an operation of each run in turn, up to `pass_tokens`, and answers all of them at its end. A run
    that is moved goes on once its old trainer's pass is over."""

    def __init__(self, clients: Sequence[Client], trainers: int, pass_tokens: int) -> None:
        self.now, self._events, self._number = 0.0, list[tuple[float, int, Callable[[], None]]](), 0
        self._pass_tokens = pass_tokens
        self.homes = Homes(pass_tokens, lambda: self.now)
        self.runs = {f"r{i}": Run(client) for i, client in enumerate(clients)}
        self.trainers: dict[str, Trainer] = {}
        self.moves: list[tuple[float, str]] = []
        self._moving: dict[str, str] = {}
        for i in range(trainers):
            self.join(f"t{i}")

    def join(self, name: str, fixed_s: float = 0.02) -> None:
        self.trainers[name] = Trainer(fixed_s)
        self.homes.offer(name, [MODEL])

    def live_on(self, name: str, *runs: str) -> None:
        for run in runs:
            self.homes.settle(Claim(run, MODEL), name)

    def begin(self) -> None:
        for i, (name, run) in enumerate(self.runs.items()):
            for _ in range(run.client.in_flight):
                self._at(i / 1000, partial(self._send, name))

    def play(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, then = heapq.heappop(self._events)
            then()
            for name, trainer in self.trainers.items():
                if not trainer.busy:
                    self._fill(name, trainer)
        self.now = until

    def counts(self) -> Counter[str]:
        """How many runs live on each trainer."""
        return Counter(dict.fromkeys(self.trainers, 0)) + Counter(str(self.homes.home(run)) for run in self.runs)

    def loads(self) -> dict[str, int]:
        """What the clients of each trainer have in flight when none of them is thinking."""
        found = dict.fromkeys(self.trainers, 0)
        for name, run in self.runs.items():
            found[str(self.homes.home(name))] += run.client.tokens * run.client.in_flight
        return found

    def _at(self, when: float, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, then))

    def _send(self, name: str) -> None:
        run = self.runs[name]
        run.queued.append(run.client.tokens)
        self._observe(name, run.client.tokens)

    def _observe(self, name: str, more: int) -> None:
        self.runs[name].outstanding += more
        self.homes.outstanding(name, self.runs[name].outstanding)

    def _fill(self, name: str, trainer: Trainer) -> None:
        self._moving = {run: source for run, source in self._moving.items() if source != name}
        for move in self.homes.even_out(
            Claim(run, MODEL, move_tokens=MOVE_TOKENS, fixed=run in self._moving) for run in self._at_home()
        ):
            self.moves.append((self.now, move.run_id))
            if self.trainers[move.source].busy:
                self._moving[move.run_id] = move.source
        waiting = [run for run in self.runs if self.runs[run].queued and self.homes.home(run) is None]
        places = self.homes.place([Claim(run, MODEL) for run in waiting])
        mine = [run for run in self.runs if (self.homes.home(run) or places.get(run)) == name]
        taken = self._pass([run for run in mine if run not in self._moving])
        if not taken:
            return
        for run in dict(taken):
            if self.homes.home(run) != name:
                self.homes.settle(Claim(run, MODEL), name)
        trainer.busy = True
        takes_s = trainer.fixed_s + sum(tokens for _, tokens in taken) / trainer.tokens_per_s
        self._at(self.now + takes_s, partial(self._answer, trainer, taken))

    def _at_home(self) -> list[str]:
        return [run for run in self.runs if self.homes.home(run) is not None]

    def _pass(self, runs: list[str]) -> list[tuple[str, int]]:
        taken, room = list[tuple[str, int]](), self._pass_tokens
        while ready := [run for run in runs if self.runs[run].queued]:
            run = min(ready, key=lambda one: self.runs[one].answered)  # fair: the one that was served least
            tokens = self.runs[run].queued[0]
            if taken and tokens > room:
                break
            self.runs[run].queued.popleft()
            self.runs[run].answered += tokens
            taken.append((run, tokens))
            room -= tokens
        return taken

    def _answer(self, trainer: Trainer, taken: list[tuple[str, int]]) -> None:
        trainer.busy = False
        for name, tokens in taken:
            self._observe(name, -tokens)
            self._at(self.now + self.runs[name].client.think_s, partial(self._send, name))
