"""A loop that outlives its process: its state lies beside the weights, in the metadata of the server's checkpoint.

    train(run, env, ..., checkpoint=Checkpoints("gsm8k-1", every=20))

Started again under the same name, by whatever machine, the loop loads the newest checkpoint of that name into its run,
optimizer included, and goes on with the next step.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import WeftError
from weft.rest_client import RestClient
from weft.training_client import TrainingClient

#: What the server takes as a checkpoint's metadata, less what is in it besides the state.
MAX_STATE_BYTES = 16_000
_NAME, _STATE, _STEP = "weft.rl", "weft.rl.state", "weft.rl.step"
_PAGE = 100


@dataclass(frozen=True)
class Checkpoints:
    """Saves under `name`, every so many steps and at the end. Older ones are deleted after `ttl_seconds`."""

    name: str
    every: int = 20
    ttl_seconds: int | None = None

    async def save(self, run: TrainingClient, step: int, state: Mapping[str, Any]) -> str:
        """Save the run after `step` steps; the checkpoint's path."""
        packed = base64.b85encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
        if len(packed) > MAX_STATE_BYTES:
            raise WeftError(
                f"the loop's state has {len(packed)} bytes, a checkpoint keeps {MAX_STATE_BYTES};"
                " a source with fewer tasks needs less"
            )
        metadata = {_NAME: self.name, _STEP: str(step), _STATE: packed}
        saved = await run.save_state(
            f"{self.name}-{step:06d}", self.ttl_seconds, overwrite=True, user_metadata=metadata
        )
        return saved.path

    async def newest(self, rest: RestClient) -> tuple[str, dict[str, Any]] | None:
        """Path and state of the checkpoint of this name with the most steps."""
        best: tuple[int, str, str] | None = None
        offset = 0
        while True:
            listed = (await rest.list_user_checkpoints(_PAGE, offset)).checkpoints
            for each in listed:
                facts = each.user_metadata or {}
                if facts.get(_NAME) == self.name and (best is None or int(facts[_STEP]) >= best[0]):
                    best = (int(facts[_STEP]), each.tinker_path, facts[_STATE])
            if len(listed) < _PAGE:
                break
            offset += _PAGE
        return None if best is None else (best[1], json.loads(zlib.decompress(base64.b85decode(best[2]))))
