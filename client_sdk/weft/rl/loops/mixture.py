"""Several environments trained together: whose turn it is, and which task each tries next."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.rl import checks
from weft.rl.envs.environment import Environment
from weft.rl.tasks.sources import Ratios, Shuffled, Source

logger = logging.getLogger("weft")


@dataclass
class Mixed:
    """An environment of a mixture, and the source of its tasks."""

    env: Environment
    source: Source


def mixture(
    env: Environment | Mapping[str, Environment], sources: Source | Mapping[str, Source] | None, seed: int
) -> dict[str, Mixed]:
    """Environments by name ("" for a single one), each with its task source: that in `sources`, else a shuffled one."""
    named = dict(env) if isinstance(env, Mapping) else {"": env}
    for each in named.values():
        checks.does("env", each, "group", "rl.prompts(tasks, reward)")
    if not isinstance(sources, Mapping | None):
        if isinstance(env, Mapping):
            raise ValueError(f"sources: a mixture takes them by name: {{{next(iter(named))!r}: ...}}")
        sources = {"": sources}
    given = dict(sources or {})
    _known("sources", given, named)
    return {name: Mixed(each, given.get(name) or Shuffled(len(each.tasks), seed)) for name, each in named.items()}


def ratios_of(envs: Mapping[str, Mixed], ratios: Mapping[str, float] | None) -> Ratios:
    """The share of each environment: equal by default, else as given, where 0 leaves one out."""
    given = ratios or dict.fromkeys(envs, 1.0)
    _known("ratios", given, envs)
    if missing := [name for name in envs if name not in given]:
        raise ValueError(f"ratios: no share for {missing[0]!r}; 0 leaves an environment out")
    return Ratios(given)


@dataclass(frozen=True, order=True)
class Try:
    """A task drawn for a group. `number` counts the draws and seeds the group's samples, so a task that a resumed loop
    tries again gets the same random numbers."""

    number: int
    name: str
    index: int


class Tries:
    """The order of tasks: first those that an earlier life left unfinished, then draws from the ratios and the
    sources."""

    def __init__(self, envs: Mapping[str, Mixed], ratios: Mapping[str, float] | None) -> None:
        self._envs, self._ratios = envs, ratios_of(envs, ratios)
        self._draws, self._again = 0, list[Try]()

    def draw(self) -> Try:
        if self._again:
            return self._again.pop(0)
        self._draws += 1
        name = self._ratios.draw()
        return Try(self._draws, name, self._envs[name].source.draw())

    def state_dict(self, tried: Iterable[Try]) -> dict[str, Any]:
        """The state, in which the unfinished `tried` are to be drawn again."""
        return {
            "ratios": self._ratios.state_dict(),
            "sources": {name: each.source.state_dict() for name, each in self._envs.items()},
            "draws": self._draws,
            "again": [(each.name, each.index, each.number) for each in sorted([*tried, *self._again])],
        }

    def _remember(self, name: str, state: Mapping[str, Any]) -> None:
        """Load the state of an earlier life's source, unless that source was of another kind."""
        source = self._envs[name].source
        try:
            source.load_state_dict(dict(state))
        except KeyError as missing:
            kind = type(source).__name__
            logger.warning(
                "the source %r begins anew: an earlier life's was no %s (%s is missing)", name, kind, missing
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ratios.load_state_dict(state["ratios"])
        for name, source in state["sources"].items():
            if name in self._envs:
                self._remember(name, source)
        # States of older clients have no draw numbers: there the numbers go on from that of the last group.
        self._draws = int(state.get("draws", state["pacer"]["numbers"]))
        for name, index, *number in state["again"]:
            self._draws += not number
            if name in self._envs and index < len(self._envs[name].env.tasks):
                self._again.append(Try(int(number[0]) if number else self._draws, name, int(index)))


def _known(what: str, given: Collection[str], envs: Collection[str]) -> None:
    if unknown := [name for name in given if name not in envs]:
        has = ", ".join(map(repr, envs)) if "" not in envs else "one without a name"
        raise ValueError(f"{what}: there is no environment {unknown[0]!r}; there is {has}")
