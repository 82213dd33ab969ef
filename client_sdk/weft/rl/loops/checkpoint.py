"""A loop that outlives its process: its state lies beside the weights, in the metadata of the server's checkpoint.

    train(run, env, ..., checkpoint=Checkpoints("gsm8k-1", every=20))

Started again under the same name, by whatever machine, the loop loads the newest checkpoint of that name into its run,
optimizer included, and goes on with the next step.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from weft.errors import WeftError
from weft.rest_client import RestClient
from weft.rl import checks
from weft.training_client import TrainingClient
from weft.wire.sessions import SessionSearchRequest
from weft.wire.shown import arguments
from weft.wire.weights import SaveWeightsRequest

#: What the server takes as a checkpoint's metadata, less what is in it besides the state.
MAX_STATE_BYTES = 16_000
_NAME, _STATE, _STEP = "weft.rl", "weft.rl.state", "weft.rl.step"
_PAGE = 100
#: The step of a checkpoint that is not gone on with: it tells what a loop has spent that was refused.
_REFUSED = -1

logger = logging.getLogger("weft")


@dataclass(frozen=True)
class Checkpoints:
    """Saves under `name`, every so many steps and at the end. Older ones are deleted after `ttl_seconds`."""

    name: str
    every: int = 20
    ttl_seconds: int | None = None

    def __post_init__(self) -> None:
        """Refuses what the server would refuse, at the first save, with the steps before it lost."""
        checks.count("every", self.every)
        with arguments(path="name"):
            SaveWeightsRequest(model_id="", path=self._named(0), ttl_seconds=self.ttl_seconds)

    def _named(self, step: int) -> str:
        return f"{self.name}-{step:06d}"

    async def save(self, run: TrainingClient, step: int, state: Mapping[str, Any], began: str | None) -> str:
        """Save the run after `step` steps; the checkpoint's path. `began` is that which this life has begun with.
        Raises WeftError where another loop has come as far under this name: which the next life goes on with would be
        chance, and what the other has spent would count for none."""
        rest, run_id = run.create_rest_client(), (await run.get_info_async()).model_id
        found = await self.newest(rest)
        ahead = found is not None and found[0] != began and found[1]["step"] >= step
        if found is not None and ahead and await _goes_on(rest, found[0], run_id):
            if _most(found[1]["elsewhere"], state) != found[1]["elsewhere"]:  # by no run's usage will it be found
                await self._put(run, step, {**state, "step": _REFUSED})
            raise WeftError(
                f"another loop saves under {self.name!r}: {found[0]} is of step {found[1]['step']}, this loop came to"
                f" step {step}. One name is for one loop at a time: start this one under another, or again once that"
                f" one has ended, to go on from there. What it has trained is in {run_id}"
            )
        if found is not None:
            runs = _together(state.get("runs", []), found[1]["runs"])
            state = {**state, "runs": runs, "elsewhere": _most(found[1]["elsewhere"], state)}
        return await self._put(run, step, state)

    async def _put(self, run: TrainingClient, step: int, state: Mapping[str, Any]) -> str:
        metadata = {_NAME: self.name, _STEP: str(state["step"]), _STATE: _fitting(state)}
        saved = await run.save_state(self._named(step), self.ttl_seconds, overwrite=True, user_metadata=metadata)
        return saved.path

    async def newest(self, rest: RestClient) -> tuple[str, dict[str, Any]] | None:
        """Path and state of the checkpoint of this name with the most steps; of several, the last that was saved. Its
        `runs`, and what was paid `elsewhere`, are those of all: a loop beside it that was refused has spent, too."""
        best: tuple[int, str, dict[str, Any]] | None = None
        runs, elsewhere = list[str](), dict[str, int]()
        offset, last = 0, ""
        while True:
            listed = (await rest.list_user_checkpoints(_PAGE, offset)).checkpoints
            if last and last not in [each.tinker_path for each in listed]:  # newer ones went: some were passed over
                offset, last = 0, ""
                continue
            for each in listed:
                facts = each.user_metadata or {}
                if facts.get(_NAME) != self.name:
                    continue
                step, state = int(facts[_STEP]), _unpacked(facts[_STATE])
                runs, elsewhere = _together(runs, state.get("runs", [])), _most(elsewhere, state)
                if step != _REFUSED and (best is None or step > best[0]):  # newer ones are listed first
                    best = step, each.tinker_path, state
            if len(listed) < _PAGE:
                break
            offset, last = offset + _PAGE - 1, listed[-1].tinker_path
        return None if best is None else (best[1], {**best[2], "runs": runs, "elsewhere": elsewhere})


async def _goes_on(rest: RestClient, path: str, run_id: str) -> bool:
    """Whether the run of `path` was asked for anything since the session of `run_id` began. That of a loop that was
    killed before was not, though its last save may have waited at the server until this loop had begun without it."""
    other = await rest.get_training_run_by_tinker_path(path, "accessible")
    own = await rest.search_sessions(SessionSearchRequest(session_id=run_id.partition(":")[0]))
    return not own.sessions or other.last_request_time >= own.sessions[0].created_at


def _together(runs: list[str], more: list[str]) -> list[str]:
    return list(dict.fromkeys([*runs, *more]))


def _most(elsewhere: Mapping[str, int], state: Mapping[str, Any]) -> dict[str, int]:
    """What was paid elsewhere, in nano-dollars, by run: each run's last word. "" is for lives that told their sum."""
    told: Mapping[str, int] = state.get("elsewhere") or {"": state.get("elsewhere_nusd", 0)}
    most = {run: max(elsewhere.get(run, 0), paid) for run, paid in told.items() if paid}
    return {**elsewhere, **most}


def _fitting(state: Mapping[str, Any]) -> str:
    """`packed`, without what the largest sources remember where that is more than a checkpoint keeps: the run that
    would end for it is worth more. Raises WeftError where something else is too large."""
    text, rollouts = packed(state), state.get("rollouts", {})
    sources = dict(rollouts.get("sources", {}))
    while len(text) > MAX_STATE_BYTES and sources:
        largest = max(sources, key=lambda name: len(json.dumps(sources[name])))
        del sources[largest]
        logger.warning(
            "the loop's state has %d bytes, a checkpoint keeps %d: the source %r begins anew in the next life."
            " One with fewer tasks needs less",
            len(text),
            MAX_STATE_BYTES,
            largest,
        )
        text = packed({**state, "rollouts": {**rollouts, "sources": sources}})
    if len(text) > MAX_STATE_BYTES:
        raise WeftError(f"the loop's state has {len(text)} bytes, a checkpoint keeps {MAX_STATE_BYTES}")
    return text


def packed(state: Mapping[str, Any]) -> str:
    """A loop's state as a checkpoint's metadata take it."""
    return base64.b85encode(zlib.compress(json.dumps(state).encode(), 9)).decode()


def _unpacked(text: str) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b85decode(text)))
    return state


def tell_resumed(checkpoint: Checkpoints | None, path: str, step: int, steps: int) -> None:
    """Going on is told, since a name that was used before is also how nothing seems to happen."""
    assert checkpoint is not None
    rest = "goes on from there" if step < steps else "has nothing left to do: more steps, or another name"
    logger.warning("%r was saved after step %d of %d (%s), and %s", checkpoint.name, step, steps, path, rest)


def advantage_state(advantage: Callable[..., Any]) -> Mapping[str, Any] | None:
    """What an advantage remembers, if it does (`RunningBaseline`)."""
    return advantage.state_dict() if isinstance(advantage, _Remembers) else None


def load_advantage(advantage: Callable[..., Any], state: Mapping[str, Any] | None) -> None:
    if state is not None and isinstance(advantage, _Remembers):
        advantage.load_state_dict(state)


@runtime_checkable
class _Remembers(Protocol):
    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
