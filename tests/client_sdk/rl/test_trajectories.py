"""What a program sampled through an OpenAI-compatible route, as a rollout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from weft import ServiceClient, rl
from weft.wire.binary.sample_codec import SampleResult, SequenceResult

from api.routes.openai.asking import Asked
from tests.client_sdk.stub_server import Stub


def test_a_stale_turn_is_told_from_one_that_reached_its_length(service: ServiceClient, stub: Stub) -> None:
    params = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1)
    about = {"request_id": "r", "target": SimpleNamespace(name="run:x"), "prompt": [1], "params": params}
    nobody = cast(Any, dict.fromkeys(("service", "who", "request", "session", "turn", "keep")))
    drawn = [
        SequenceResult(np.array([5], np.int32), np.array([-1.0], np.float32), "length", stale=stale)
        for stale in (True, False)
    ]
    told = [turn.model_dump() for turn in Asked(**nobody, **cast(Any, about))._turns(SampleResult(drawn))]
    stub.replies["GET /weft/turns/s"] = {"session": "s", "turns": told}
    assert [turn.stale for turn in rl.trajectories("s", service).turns] == [True, False]
