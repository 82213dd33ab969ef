"""Loops on a real server that are killed, die or are started again, also beside each other: what they keep."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import weft
from weft import rl

from tests.e2e.conftest import Weftd
from tests.e2e.rl_tasks import ONE_TURN, SMALL, fresh, right, rows, sums, warned
from tests.forked import Forked, run_forked

pytestmark = pytest.mark.server


LIFE = """
import json, sys, weft
from weft import rl
from tests.e2e.rl_tasks import ONE_TURN
from tests.e2e.test_rl_lives import Noted
with weft.ServiceClient() as service:
    run = service.create_lora_training_client("weft/tiny-moe", rank=8, seed=0)
    report = rl.train(run, ONE_TURN, steps=int(sys.argv[2]), groups=rl.Groups(batch=4, size=4), schedule=rl.Async(1),
        learning_rate=1e-3, sinks=[Noted(sys.argv[1])], checkpoint=rl.Checkpoints("life", every=3), seed=4)
    print(json.dumps({"resumed_at": report.resumed_at, "spent": report.spent_nusd}))
"""


class Noted(rl.JsonLines):
    """A file of steps, written slowly so that a test can see a step before the next is over."""

    def log(self, step: int, of: int, metrics: Any) -> None:
        super().log(step, of, metrics)
        time.sleep(0.2)


def test_killed_whatever_is_killed_it_goes_on_and_trains_nothing_too_old(
    own_weftd: Callable[..., Weftd], tmp_path: Path
) -> None:
    """SIGKILL for the trainer, the generator, then the client. Its next life goes on from the last save; the server's
    records of both runs tell, by the sequences that training named, how old trained tokens were."""
    server, lines, steps = own_weftd(), tmp_path / "steps.jsonl", 12
    environment = os.environ | {"WEFT_BASE_URL": server.url, "WEFT_API_KEY": server.key("killed")}
    life = ("-c", LIFE, str(lines), str(steps))
    first = Forked(*life, env=environment)

    def reach(step: int) -> None:
        deadline = time.monotonic() + 200
        while len(seen(lines)) < step:
            assert time.monotonic() < deadline
            assert first.poll() is None
            time.sleep(0.02)

    for step, role in ((1, "trainer"), (3, "generator")):
        reach(step)
        server.worker(role).kill()
    reach(5)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = run_forked(*life, env=environment)
    assert second.returncode == 0, second.stderr
    told = json.loads(second.stdout)
    assert told["resumed_at"] in (3, 6)
    numbers = [each["step"] for each in seen(lines)]
    again = numbers[numbers.index(told["resumed_at"], 5 if told["resumed_at"] < 5 else 0) :]
    assert again == list(range(told["resumed_at"], steps))
    assert max(each["lag/max"] for each in seen(lines)) <= 1
    with weft.ServiceClient(base_url=server.url, api_key=server.key("killed")) as service:
        rest = service.create_rest_client()
        assert rest.get_usage().result(60).total_nusd <= told["spent"]
        runs = rest.list_training_runs().result(60).training_runs
        ages = [rest.get_run_health(run.training_run_id).result(60) for run in runs]
    assert len(ages) == 2
    for health in ages:
        assert health.named
        assert sum(health.staleness.values()) > 0
        assert max(health.staleness) <= 1


def seen(path: Path) -> list[dict[str, float]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


class Dies:
    """A sink that ends the program at a given step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing to close."""


class Quiet:
    """A sink that keeps nothing."""

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        """Keeps nothing."""

    def close(self) -> None:
        """Nothing to close."""


def test_a_life_that_dies_before_its_first_checkpoint_is_paid_from_the_budget(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    def life(run: weft.TrainingClient, steps: int, at: int = 99) -> rl.Report:
        kept = rl.Checkpoints("short-lives", every=50)
        return rl.train(
            run, ONE_TURN, steps=steps, groups=SMALL, checkpoint=kept, budget_usd=1.0, sinks=[Dies(at)], seed=2
        )

    first, second = fresh(service), fresh(service)
    with pytest.raises(KeyboardInterrupt):
        life(first, steps=2, at=1)
    spent = first.cost().result(60).total_nusd
    assert spent > 0
    report = life(second, steps=2)
    assert (report.resumed_at, len(report.steps)) == (0, 2)
    both = spent + second.cost().result(60).total_nusd
    assert both <= report.spent_nusd
    more = life(second, steps=3)  # the same run, whose cost counts once
    assert more.resumed_at == 2
    assert more.spent_nusd < both + second.cost().result(60).total_nusd
    nothing = life(second, steps=3)
    assert nothing.steps == []
    assert "was saved after step 3 of 3" in warned(caplog, "has nothing left to do: more steps, or another name")[0]


@pytest.mark.parametrize("ratios", [None, {"sums": 2, "more": 1}], ids=["one", "mixture"])
def test_a_life_goes_on_with_what_would_have_come(service: weft.ServiceClient, ratios: dict[str, float] | None) -> None:
    """Tasks that were under way are drawn as they would have been, and none is replaced by another."""
    own = rl.prompts(sums(), lambda text, task: float(len(text)), max_tokens=4)
    more = rl.prompts(sums(seed=1), lambda text, task: float(len(text)), max_tokens=4)
    env: Any = own if ratios is None else {"sums": own, "more": more}

    def life(name: str, at: int = 99) -> rl.Report:
        kept, sinks, groups = rl.Checkpoints(name, every=2), [Dies(at)], rl.Groups(batch=3, size=4)
        run = fresh(service)
        return rl.train(
            run, env, ratios=ratios, steps=6, groups=groups, learning_rate=1e-3, checkpoint=kept, sinks=sinks, seed=5
        )

    undisturbed = life(f"undisturbed-{ratios is None}")
    with pytest.raises(KeyboardInterrupt):
        life(f"disturbed-{ratios is None}", at=2)
    rest = life(f"disturbed-{ratios is None}")
    assert rest.resumed_at == 2
    for now, then in zip(rest.steps, undisturbed.steps[2:], strict=True):
        for name in ("reward", "loss", "grad_norm"):
            assert now.get(name) == pytest.approx(then.get(name), rel=1e-4, abs=1e-7)


def test_steps_of_another_size_are_not_gone_on_with(service: weft.ServiceClient) -> None:
    """The place to go on is a number of steps: at twice the size it would skip as many data as were trained."""
    tokenizer = fresh(service).get_tokenizer()
    talks = [
        [{"role": "user", "content": t["prompt"]}, {"role": "assistant", "content": t["answer"]}] for t in sums()[:12]
    ]
    data, kept = rl.conversations(talks, tokenizer), rl.Checkpoints("another-size", every=1)
    with pytest.raises(KeyboardInterrupt):
        rl.sft(fresh(service), data, batch=2, checkpoint=kept, sinks=[Dies(3)])
    with pytest.raises(ValueError, match="'another-size' was saved with batch=2, got 4"):
        rl.sft(fresh(service), data, batch=4, checkpoint=kept, sinks=[])
    rest = rl.sft(fresh(service), data, batch=2, checkpoint=kept, sinks=[])
    assert (rest.resumed_at, len(rest.steps)) == (3, 3)


@pytest.mark.parametrize("whose", ["loop", "environment", "mixture"])
def test_what_an_advantage_remembers_is_kept(service: weft.ServiceClient, whose: str) -> None:
    def life(baseline: rl.RunningBaseline, steps: int) -> None:
        own = None if whose == "loop" else baseline
        env: Any = rl.prompts(sums(), lambda text, task: 1.0, max_tokens=2, advantage=own)
        env = {"sums": env, "more": rl.prompts(sums(), max_tokens=2)} if whose == "mixture" else env
        kept = rl.Checkpoints(f"baseline-{whose}", every=50)
        more = {"advantage": baseline} if whose == "loop" else {}
        rl.train(fresh(service), env, steps=steps, groups=SMALL, checkpoint=kept, sinks=[], **more)

    first, second = rl.RunningBaseline(), rl.RunningBaseline()
    life(first, 1)
    assert first.baseline > 0.1
    life(second, 1)
    assert second.baseline == first.baseline


def test_a_source_that_remembers_more_than_a_checkpoint_keeps_does_not_end_the_run(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    chance, tasks = random.Random(0), sums(4)

    def life(steps: int) -> tuple[rl.Report, rl.DifficultyPools]:
        pools = rl.DifficultyPools(20_000)
        if steps == 1:
            pools.means = {index: chance.random() for index in range(pools.count)}
        many = rl.prompts(tasks * (pools.count // 4), right, max_tokens=2)
        envs = {"many": many, "few": rl.prompts(tasks, right, max_tokens=2)}
        kept = rl.Checkpoints("much-to-remember")
        more: dict[str, Any] = {"groups": SMALL, "checkpoint": kept, "sinks": []}
        return rl.train(fresh(service), envs, steps=steps, sources={"many": pools}, **more), pools

    report, _ = life(1)
    assert len(report.steps) == 1
    assert len(warned(caplog, "'many' begins anew in the next life")) == 1
    report, pools = life(2)
    assert (report.resumed_at, len(report.steps)) == (1, 1)
    assert report.steps[0]["few/epoch"] > 0.25  # what is small goes on
    assert len(pools.means) <= 2


class Started:
    """A sink during whose first step other loops are started; `told` has the errors of those that were refused."""

    def __init__(self, *loops: Callable[[], object]) -> None:
        self.loops, self.told = list(loops), list[str]()

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        while self.loops:
            loop = self.loops.pop()
            try:
                with ThreadPoolExecutor() as pool:
                    pool.submit(loop).result(60)
            except weft.WeftError as error:
                self.told.append(str(error))

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_two_loops_do_not_train_one_run_at_the_same_time(service: weft.ServiceClient, kind: str) -> None:
    """Such as when a cell of a notebook is run again, or threads share a run: each step would take both loops'
    gradients, unseen."""
    run = fresh(service)
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "8"}]
    data = rl.conversations([talk], run.get_tokenizer())

    def loop(kind: str, sink: Any) -> rl.Report:
        if kind == "sft":
            return rl.sft(run, data, batch=1, sinks=[sink])
        return rl.train(run, ONE_TURN, steps=1, groups=SMALL, sinks=[sink])

    sink = Started(lambda: loop("sft", Quiet()), lambda: loop("train", Quiet()))
    assert len(loop(kind, sink).steps) == 1
    assert ["another loop trains this run" in told for told in sink.told] == [True, True]
    assert len(loop("sft", Quiet()).steps) == 1  # after the first loop has ended


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_two_loops_do_not_save_under_one_name_at_the_same_time(service: weft.ServiceClient, kind: str) -> None:
    """Such as when a job is submitted twice, or a laptop wakes up whose loop goes on elsewhere: the loop that is behind
    is refused, and the next life goes on from the other."""
    loop, name = under_one_name(service, kind), f"one-name-{kind}"
    with pytest.raises(weft.WeftError, match=rf"'{name}': tinker://\S+ is of step 4, this loop came to step 2"):
        loop(name, Started(lambda: loop(name, Quiet())))
    assert loop(name, Quiet()).resumed_at == 4


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_what_a_loop_under_the_same_name_has_spent_is_of_the_budget_too(service: weft.ServiceClient, kind: str) -> None:
    """It began while the first went on, and came less far: the next life goes on from the first."""
    runs: list[weft.TrainingClient] = []
    loop, name = under_one_name(service, kind, runs), f"beside-{kind}"
    loop(name, beside := Started(lambda: loop(name, Quiet(), 1)))
    again = loop(name, Quiet())
    assert (len(runs), beside.told, again.resumed_at) == (3, [], 4)
    assert again.spent_nusd == sum(run.cost().result(60).total_nusd for run in runs)


def under_one_name(
    service: weft.ServiceClient, kind: str, runs: list[weft.TrainingClient] | None = None
) -> Callable[..., rl.Report]:
    """A loop of so many steps that saves under this name; it makes a run of its own, and adds it to `runs`."""
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "8"}]
    data = rl.conversations([talk] * 4, fresh(service).get_tokenizer())

    def loop(name: str, sink: Any, steps: int = 4) -> rl.Report:
        more: dict[str, Any] = {"checkpoint": rl.Checkpoints(name, every=2), "sinks": [sink], "budget_usd": 1.0}
        run = fresh(service)
        if runs is not None:
            runs.append(run)
        if kind == "sft":
            return rl.sft(run, data[:steps], batch=1, **more)
        return rl.train(run, ONE_TURN, steps=steps, groups=SMALL, **more)

    return loop


class Interrupted:
    """A run whose user presses Ctrl-C while its first gradient is computed."""

    def __init__(self, run: weft.TrainingClient) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def forward_backward(self, data: Any, loss: str) -> Any:
        self._run.forward_backward(data, loss)
        return SimpleNamespace(result=self._press)

    def _press(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_what_ctrl_c_interrupts_leaves_no_gradient_for_the_next(service: weft.ServiceClient, kind: str) -> None:
    """In a notebook the same cell is then run again."""
    talks = [[{"role": "user", "content": s["prompt"]}, {"role": "assistant", "content": s["answer"]}] for s in sums(4)]
    base = service.create_sampling_client(base_model="weft/tiny-moe")
    tokenizer = base.get_tokenizer()

    def go(run: Any) -> float:
        more: dict[str, Any] = {"batch": 4, "learning_rate": 0.0, "sinks": []}
        if kind == "sft":
            return rl.sft(run, rl.conversations(talks, tokenizer), **more).steps[0]["grad_norm"]
        return rl.dpo(run, rl.pairs(rows(4), tokenizer), reference=base, **more).steps[0]["grad_norm"]

    run = fresh(service)
    alone = go(run)
    with pytest.raises(KeyboardInterrupt):
        go(Interrupted(run))
    assert go(run) == pytest.approx(alone, rel=1e-5)
