"""Tasks, runs and what was warned of, for the tests of `weft.rl` on a real service."""

from __future__ import annotations

import random
from typing import Any

import pytest
import weft
from weft import rl

from tests.e2e.conftest import BASE_MODEL

SMALL = rl.Groups(batch=2, size=4)


def sums(count: int = 64, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    asked = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]
    return [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in asked]


def right(text: str, task: Any) -> float:
    return float(text.strip() == task["answer"])


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": s["prompt"], "chosen": s["answer"], "rejected": "it is raining"} for s in sums(count)]


ONE_TURN = rl.prompts(sums(), right, max_tokens=6, expected=rl.Size(drawn=6, read=20))


def fresh(service: weft.ServiceClient, seed: int = 0, rank: int = 8) -> weft.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=rank, seed=seed)


def warned(caplog: pytest.LogCaptureFixture, begins: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if begins in each.getMessage()]
