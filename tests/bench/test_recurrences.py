"""The steps that bench/recurrences.py times are really computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bench import recurrences
from workers.model.config import DecoderConfig, DeltaConfig, MambaConfig
from workers.model.parts import one_token

_SMALL = {
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
}
DELTA = replace(
    recurrences.MODELS["Qwen3.5-0.8B"], **_SMALL, delta=DeltaConfig((0, 1, 2), 2, 2, 16, 16, 4, grouped=False)
)
MAMBA = replace(recurrences.MODELS["Nemotron-3-Nano"], **_SMALL, mamba=MambaConfig((0, 1), 4, 8, 2, 16, 4))


@pytest.mark.parametrize("config", [DELTA, MAMBA], ids=["delta", "mamba"])
def test_each_timed_step_is_computed_and_none_fails(config: DecoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = Counter[str](), {name: getattr(one_token, name) for name in ("_in_c", "in_torch")}
    monkeypatch.setattr(recurrences, "BATCH", 3)
    for name in plain:
        monkeypatch.setattr(one_token, name, lambda *given, name=name: (calls.update([name]), plain[name](*given))[1])
    assert all(took > 0 for took in recurrences.measured(config, rounds=2).values())
    assert calls["in_torch"] == 2 * (1 + recurrences.STEPS) * len(config.recurrent_layers)
