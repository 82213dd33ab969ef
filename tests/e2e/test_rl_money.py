"""What a loop pays for, its teacher and its reference included, and that no budget is passed."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import weft
from weft import rl

from tests.e2e.conftest import Weftd
from tests.e2e.rl_tasks import ONE_TURN, SMALL, fresh, rows, sums, warned
from tests.forked import Forked
from tests.waiting import until
from workers.model.tiny import TINY_PATH

pytestmark = pytest.mark.server
#: A second name for the built-in model, thirteen times as expensive per token.
DEAR = "deepseek-ai/DeepSeek-V3.1"


def test_the_budget_is_never_passed(service: weft.ServiceClient) -> None:
    run = fresh(service)
    groups = rl.Groups(batch=4, size=4)
    whole = rl.estimate(run, ONE_TURN, groups=groups, steps=100)
    budget = whole.total_nusd / 1e9 / 20
    report = rl.train(run, ONE_TURN, steps=100, groups=groups, schedule=rl.Async(1), budget_usd=budget, sinks=[])
    assert report.ended == "budget"
    assert 1 <= len(report.steps) < 100
    time.sleep(1)  # cancelled samples are billed when they end
    assert run.cost().result(60).total_nusd <= report.spent_nusd <= budget * 1e9


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


async def patient(task: Any, chat: rl.Chat) -> float:
    """User code that treats any error as an answer, as many agent frameworks do."""
    try:
        await chat.agent("critic").user(task["prompt"]).sample(max_tokens=1500)
    except Exception:
        return 0.0
    return 1.0


def test_a_budget_that_is_spent_is_no_reward_though_code_goes_on_from_any_error(service: weft.ServiceClient) -> None:
    run = fresh(service)
    one = run.create_rest_client().get_prices("weft/tiny-moe").result(60).rates_uusd_per_mtok["sample"] * 1500 / 1e12
    more: dict[str, Any] = {"steps": 3, "groups": SMALL, "sinks": []}
    report = rl.train(run, rl.function(patient, sums(4)), budget_usd=3.5 * one, **more)  # three of eight rollouts
    assert (report.ended, report.steps) == ("budget", [])


def test_scoring_what_is_not_trained_is_within_the_budget(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    talks = [[{"role": "user", "content": s["prompt"]}, {"role": "assistant", "content": s["answer"]}] for s in sums(8)]
    run = fresh(service)
    data = rl.conversations(talks, run.get_tokenizer())
    report = rl.sft(run, data[:2], test=data * 4, every=1, batch=2, epochs=2, sinks=[], budget_usd=1.0)
    assert run.cost().result(60).total_nusd <= report.spent_nusd
    with caplog.at_level(logging.WARNING):
        ended = rl.sft(run, data, batch=2, sinks=[], budget_usd=1e-9)
    assert (ended.ended, len(warned(caplog, "could be passed"))) == ("budget", 1)


def test_a_step_that_was_taken_is_told_though_the_budget_ends_at_scoring(
    service: weft.ServiceClient, tmp_path: Path
) -> None:
    talk = [{"role": "user", "content": "3 + 5 ="}, {"role": "assistant", "content": "8"}]
    run = fresh(service)
    data = rl.conversations([talk], run.get_tokenizer())
    rates = run.create_rest_client().get_prices("weft/tiny-moe").result(60).rates_uusd_per_mtok
    two_steps_usd = 2 * data[0].model_input.length * rates["train"] / 1e12
    steps = tmp_path / "steps.jsonl"
    more: dict[str, Any] = {"batch": 1, "epochs": 3, "sinks": [rl.JsonLines(steps)], "budget_usd": two_steps_usd}
    report = rl.sft(run, data, test=data * 100, every=1, **more)
    assert report.ended == "budget"
    assert (len(report.curve("loss")), report.curve("test/loss")) == (1, [])
    assert [json.loads(line)["loss"] for line in steps.read_text().splitlines()] == report.curve("loss")


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

        until(lambda: under_way() == FEW.batch, 200)
        first.kill()
        first.wait()
        with weft.ServiceClient(base_url=server.url, api_key=server.key()) as service:
            run, rest = fresh(service), service.create_rest_client()
            batch_nusd = rest.get_usage().result(60).held_nusd
            more: dict[str, Any] = {"groups": FEW, "sinks": [], "budget_usd": 2.5 * batch_nusd / 1e9}
            report = rl.train(run, LONG, steps=9, checkpoint=rl.Checkpoints("long"), **more)
            until(lambda: under_way() == 0, 200)
            bill = rest.get_usage().result(60)
    assert report.ended == "budget"
    assert (bill.total_nusd > 2 * batch_nusd * 0.9, bill.held_nusd) == (True, 0)
    assert bill.total_nusd <= report.spent_nusd <= 2.5 * batch_nusd
