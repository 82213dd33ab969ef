"""Several environments that train together: what each tries next, and how often its turn comes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from weft.rl.envs.environment import Environment
from weft.rl.tasks.sources import Ratios, Shuffled, Source


@dataclass
class Mixed:
    """An environment of a mixture, and what it tries next."""

    env: Environment
    source: Source
    again: list[int] = field(default_factory=list)

    def draw(self) -> int:
        return self.again.pop(0) if self.again else self.source.draw()


def mixture(
    env: Environment | Mapping[str, Environment], sources: Source | Mapping[str, Source] | None, seed: int
) -> dict[str, Mixed]:
    """Environments by name, "" where there is one; `sources` are those that do not shuffle."""
    named = dict(env) if isinstance(env, Mapping) else {"": env}
    if not isinstance(sources, Mapping | None):
        if isinstance(env, Mapping):
            raise ValueError(f"sources: a mixture takes them by name: {{{next(iter(named))!r}: ...}}")
        sources = {"": sources}
    given = dict(sources or {})
    _known("sources", given, named)
    return {name: Mixed(each, given.get(name) or Shuffled(len(each.tasks), seed)) for name, each in named.items()}


def ratios_of(envs: Mapping[str, Mixed], ratios: Mapping[str, float] | None) -> Ratios:
    """Equal shares where nothing is said; else a share for each, which may be 0."""
    given = ratios or dict.fromkeys(envs, 1.0)
    _known("ratios", given, envs)
    if missing := [name for name in envs if name not in given]:
        raise ValueError(f"ratios: no share for {missing[0]!r}; 0 leaves an environment out")
    return Ratios(given)


def _known(what: str, given: Collection[str], envs: Collection[str]) -> None:
    if unknown := [name for name in given if name not in envs]:
        has = ", ".join(map(repr, envs)) if "" not in envs else "one without a name"
        raise ValueError(f"{what}: there is no environment {unknown[0]!r}; there is {has}")
