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

#: How many bytes of a checkpoint's metadata the server leaves for the loop's state.
MAX_STATE_BYTES = 16_000
_NAME, _STATE, _STEP = "weft.rl", "weft.rl.state", "weft.rl.step"
_PAGE = 100
#: The step of a checkpoint that is never resumed: it only records what a refused loop has spent.
_REFUSED = -1

logger = logging.getLogger("weft")


@dataclass(frozen=True)
class Checkpoints:
    """Saves under `name`, every so many steps and at the end. Older ones are deleted after `ttl_seconds`."""

    name: str
    every: int = 20
    ttl_seconds: int | None = None

    def __post_init__(self) -> None:
        """Refuse here what the server would refuse at the first save, when the steps before it would be lost."""
        checks.count("every", self.every)
        with arguments(path="name"):
            SaveWeightsRequest(model_id="", path=self._named(0), ttl_seconds=self.ttl_seconds)

    def _named(self, step: int) -> str:
        return f"{self.name}-{step:06d}"

    async def save(self, run: TrainingClient, step: int, state: Mapping[str, Any], began: str | None) -> str:
        """Save the run after `step` steps; returns the checkpoint's path. `began` is the checkpoint that this life
        resumed from. Raises WeftError if another loop has saved as many steps under this name: which of the two the
        next life resumes would be chance, and the spending of the other would be lost."""
        rest = run.create_rest_client()
        found = await self.newest(rest)
        if found is not None and found[0] != began and found[1]["step"] >= step:
            run_id = (await run.get_info_async()).model_id
            if await _goes_on(rest, found[0], run_id):
                # nothing else records this spending: no run is billed for it
                if _most(found[1]["elsewhere"], state) != found[1]["elsewhere"]:
                    await self._put(run, step, {**state, "step": _REFUSED})
                raise WeftError(
                    f"another loop saves under {self.name!r}: {found[0]} is of step {found[1]['step']}, this loop came"
                    f" to step {step}. One name is for one loop at a time: start this one under another, or again once"
                    f" that one has ended, to go on from there. What it has trained is in {run_id}"
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
        """Path and state of the checkpoint of this name with the most steps; among equals, the last that was saved. Its
        `runs` and `elsewhere` are joined from all checkpoints of the name: a loop that was refused beside it has spent
        money, too."""
        best: tuple[int, str, dict[str, Any]] | None = None
        runs, elsewhere = list[str](), dict[str, int]()
        offset, last = 0, ""
        while True:
            listed = (await rest.list_user_checkpoints(_PAGE, offset)).checkpoints
            # newer checkpoints were deleted meanwhile, so the pages have shifted
            if last and last not in [each.tinker_path for each in listed]:
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
    """Spending billed to no run, in nano-dollars, by the run of the life that paid: the largest sum that each has
    recorded. The key "" is for older states, which have one sum."""
    told: Mapping[str, int] = state.get("elsewhere") or {"": state.get("elsewhere_nusd", 0)}
    most = {run: max(elsewhere.get(run, 0), paid) for run, paid in told.items() if paid}
    return {**elsewhere, **most}


def _fitting(state: Mapping[str, Any]) -> str:
    """`packed`, dropping the state of the largest task sources until it fits into a checkpoint: losing it is better
    than ending the run. Raises WeftError if the rest is too large."""
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
    """A loop's state as text for a checkpoint's metadata."""
    return base64.b85encode(zlib.compress(json.dumps(state).encode(), 9)).decode()


def _unpacked(text: str) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b85decode(text)))
    return state


def tell_resumed(checkpoint: Checkpoints | None, path: str, step: int, steps: int) -> None:
    """Log that the loop resumes: a name used before could otherwise look as if nothing happened."""
    assert checkpoint is not None
    rest = "goes on from there" if step < steps else "has nothing left to do: more steps, or another name"
    logger.warning("%r was saved after step %d of %d (%s), and %s", checkpoint.name, step, steps, path, rest)


def advantage_state(advantage: Callable[..., Any]) -> Mapping[str, Any] | None:
    """The state of an advantage that keeps one from step to step (`RunningBaseline`); None for others."""
    return advantage.state_dict() if isinstance(advantage, _Remembers) else None


def load_advantage(advantage: Callable[..., Any], state: Mapping[str, Any] | None) -> None:
    if state is not None and isinstance(advantage, _Remembers):
        advantage.load_state_dict(state)


@runtime_checkable
class _Remembers(Protocol):
    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
