"""What a loop pays for besides its own run: its teacher and its reference."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import weft
from weft import rl

from tests.e2e.conftest import Weftd
from tests.e2e.test_rl import ONE_TURN, fresh, rows, sums
from tests.forked import Forked
from workers.model.tiny import TINY_PATH

pytestmark = pytest.mark.server
#: A second name for the built-in model, thirteen times as expensive per token.
DEAR = "deepseek-ai/DeepSeek-V3.1"


@pytest.mark.parametrize("kind", ["distill", "dpo"])
def test_a_budget_counts_the_teacher_and_reference_in_all_lives(own_weftd: Callable[..., Weftd], kind: str) -> None:
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
        assert bill <= first.spent_nusd <= 1.5 * bill  # some of the prompt is cached
        again = life()
        assert (len(first.steps), again.steps) == (1, [])
        assert bill <= again.spent_nusd <= first.spent_nusd


def test_a_traced_loss_that_the_server_does_not_run_is_two_passes_of_the_budget(weftd: Weftd) -> None:
    """With an older server the client computes the loss itself, between a forward and a backward."""
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("two-passes")) as service:
        run = fresh(service)
        assert run.get_info().model_id
        session = run._run.session
        session.config = session.config.model_copy(update={"custom_loss_server_side": False})
        groups, reward = rl.Groups(batch=2, size=4), lambda text, task: float(len(text))
        env = rl.prompts(sums(), reward, max_tokens=6)
        report = rl.train(run, env, loss=rl.losses.icepop(), steps=2, groups=groups, sinks=[], budget_usd=1.0)
        assert sum(report.curve("data")) > 0
        assert run.cost().result(60).total_nusd <= report.spent_nusd


LONG = rl.prompts(sums(), lambda text, task: float(len(text)), max_tokens=1000, stop=[])
FEW = rl.Groups(batch=2, size=4)
LIFE = """
import weft
from weft import rl
from tests.e2e.test_rl_money import FEW, LONG
run = weft.ServiceClient().create_lora_training_client("weft/tiny-moe", rank=8)
rl.train(run, LONG, steps=9, groups=FEW, sinks=[], budget_usd=1.0, checkpoint=rl.Checkpoints("long"))
"""


def test_what_a_killed_life_has_left_under_way_is_paid_from_the_budget(own_weftd: Callable[..., Weftd]) -> None:
    """Its samples go on at the server, and are billed while the next life spends."""
    server = own_weftd()
    first = Forked("-c", LIFE, env=os.environ | {"WEFT_BASE_URL": server.url, "WEFT_API_KEY": server.key()})
    with closing(sqlite3.connect(server.data_dir / "weft.db")) as database:

        def under_way() -> int:
            query = "SELECT count(*) FROM operations WHERE kind = 'sample' AND state = 'queued'"
            return int(database.execute(query).fetchone()[0])

        def wait_for(count: int) -> None:
            deadline = time.monotonic() + 200
            while under_way() != count:
                assert time.monotonic() < deadline
                time.sleep(0.02)

        wait_for(FEW.batch)
        first.kill()
        first.wait()
        with weft.ServiceClient(base_url=server.url, api_key=server.key()) as service:
            run, rest = fresh(service), service.create_rest_client()
            batch_nusd = rest.get_usage().result(60).held_nusd
            more: dict[str, Any] = {"groups": FEW, "sinks": [], "budget_usd": 2.5 * batch_nusd / 1e9}
            report = rl.train(run, LONG, steps=9, checkpoint=rl.Checkpoints("long"), **more)
            wait_for(0)
            bill = rest.get_usage().result(60)
    assert report.ended == "budget"
    assert (bill.total_nusd > 2 * batch_nusd * 0.9, bill.held_nusd) == (True, 0)
    assert bill.total_nusd <= report.spent_nusd <= 2.5 * batch_nusd
