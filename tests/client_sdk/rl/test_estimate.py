"""What a loop will cost, calculated by hand."""

from __future__ import annotations

from typing import Any, cast

import pytest
from weft import rl
from weft.errors import WeftError

from tests.client_sdk.rl.test_train import DRAWN, READ, TRAINED, Pupil


def estimate(env: Any, **more: Any) -> tuple[dict[str, int], int]:
    found = rl.estimate(cast(Any, Pupil(())), env, **more)
    assert (found.base_model, found.exact) == ("base", False)
    return {row.kind: row.tokens for row in found.rows}, found.total_nusd


def test_an_estimate_is_what_each_environments_rollouts_are_expected_to_take() -> None:
    """In each of four turns half of the whole conversation is read, on average."""
    one = rl.prompts(["?"], max_tokens=6, expected=rl.Size(drawn=6, read=20))
    four = rl.prompts(["?"], max_tokens=6, expected=rl.Size(drawn=10, read=30, turns=4))
    env, groups = {"one": one, "four": four}, rl.Groups(batch=4, size=2)
    read, drawn, trained = 60 * 20 + 20 * 80, 60 * 6 + 20 * 10, 60 * 26 + 20 * 40
    tokens = {"prefill": read, "sample": drawn, "train": trained}
    price = READ * read + DRAWN * drawn + TRAINED * trained
    assert estimate(env, groups=groups, steps=10, ratios={"one": 3, "four": 1}) == (tokens, price)
    assert estimate(one)[0]["sample"] == 100 * 16 * 8 * 6
    assert estimate(one, steps=0) == ({}, 0)


def test_an_estimate_needs_to_know_what_a_rollout_takes() -> None:
    with pytest.raises(WeftError, match=r"does not say what a rollout takes: expected=rl.Size\(drawn=200"):
        estimate(rl.prompts(["?"], max_tokens=6))
