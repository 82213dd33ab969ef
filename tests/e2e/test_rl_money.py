"""What a loop pays for besides its own run: a teacher, a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import weft
from weft import rl

from tests.e2e.conftest import Weftd
from tests.e2e.test_rl import ONE_TURN, fresh, rows
from workers.model.tiny import TINY_PATH

pytestmark = pytest.mark.server
#: Served here by the built-in model's weights, at its own prices: thirteen times as much a token.
DEAR = "deepseek-ai/DeepSeek-V3.1"


@pytest.mark.parametrize("kind", ["distill", "dpo"])
def test_a_budget_counts_whom_a_loop_asks_in_all_its_lives(own_weftd: Callable[..., Weftd], kind: str) -> None:
    server = own_weftd("--model", f"{DEAR}={TINY_PATH}", "--model", f"weft/tiny-moe={TINY_PATH}")
    with weft.ServiceClient(base_url=server.url, api_key=server.key()) as service:
        asked = service.create_sampling_client(base_model=DEAR)
        more: dict[str, Any] = {"checkpoint": rl.Checkpoints(f"asks-{kind}"), "budget_usd": 1.0, "sinks": []}

        def life() -> rl.Report:
            run = fresh(service)
            if kind == "distill":
                return rl.distill(run, ONE_TURN, asked, steps=1, groups=rl.Groups(batch=2, size=4), **more)
            return rl.dpo(run, rl.pairs(rows(4), run.get_tokenizer()), reference=asked, batch=4, **more)

        first = life()
        bill = service.create_rest_client().get_usage().result(60).total_nusd
        assert bill <= first.spent_nusd <= 1.5 * bill  # some of it is cached
        again = life()
        assert (len(first.steps), again.steps) == (1, [])
        assert bill <= again.spent_nusd <= first.spent_nusd
