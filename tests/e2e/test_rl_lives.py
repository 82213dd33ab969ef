"""Loops that die or are started again on a real server: what they keep, and what they tell users at once."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import weft
from weft import rl
from weft.rl.supervised.dpo import Pair

from tests.e2e.conftest import Weftd
from tests.e2e.test_rl import ONE_TURN, fresh, right, rows, sums

pytestmark = pytest.mark.server
SMALL = rl.Groups(batch=2, size=4)


@pytest.fixture
def service(weftd: Weftd) -> Iterator[weft.ServiceClient]:
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("lives")) as service:
        yield service


class Dies:
    """A sink that ends the program at a given step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing to close."""


def warned(caplog: pytest.LogCaptureFixture, begins: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if begins in each.getMessage()]


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


def test_what_teaches_nothing_is_told_and_the_last_weights_are_evaluated(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    calls, tasks = iter(range(1000)), sums(4)

    async def solve(task: Any, chat: rl.Chat) -> float:
        await chat.user(task["prompt"]).sample(max_tokens=2)
        if next(calls) % 8 < 2:
            raise KeyError("no such column")
        return 0.0

    tried = rl.Evaluation(rl.prompts(tasks[:2], right, max_tokens=2), every=2)
    report = rl.train(
        fresh(service), rl.function(solve, tasks), steps=3, groups=SMALL, evaluation=tried, sinks=[Quiet()]
    )
    assert [number for number, step in enumerate(report.steps) if "eval/reward" in step] == [1, 2]
    assert warned(caplog, "a rollout failed") == [
        "a rollout failed: KeyError: 'no such column' (others like it are only counted)"
    ]
    assert report.steps[-1]["waste/failed_rollouts"] > 1
    assert warned(caplog, "trains nothing") == [
        "step 0 trains nothing: no rollout earned more or less than the others of its group (rewards from 0 to 0)."
        " Where that stays, look at the reward function and at how hard the tasks are; `data` counts what is trained"
    ]


def test_an_environment_may_name_a_metric_as_no_curve_is_named(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"länge": 1.0, "long" * 20: 2.0, "fine": 3.0}
    env = rl.prompts(sums(4), lambda text, task: rl.Reward(len(text), odd), max_tokens=2)
    report = rl.train(fresh(service), env, steps=2, groups=SMALL, sinks=[])
    assert [report.curve(name) for name in odd] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert len(warned(caplog, "'länge' is not logged at step 0")) == 1


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_a_full_disk_under_a_sink_ends_no_run(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    run = fresh(service)
    more: dict[str, Any] = {"sinks": [rl.JsonLines("/dev/full")]}
    if kind == "sft":
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "8"}]
        report = rl.sft(run, rl.conversations([talk], run.get_tokenizer()), batch=1, epochs=2, **more)
    else:
        report = rl.train(run, ONE_TURN, steps=2, groups=SMALL, **more)
    assert (report.ended, len(report.steps)) == ("done", 2)
    assert len(warned(caplog, "JsonLines failed at step 0: OSError: [Errno 28] No space left on device")) == 1


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


class Quiet:
    """A sink that keeps nothing."""

    def log(self, step: int, of: int, metrics: Mapping[str, float]) -> None:
        """Keeps nothing."""

    def close(self) -> None:
        """Nothing to close."""


def test_a_filter_that_takes_nothing_is_told_while_it_costs(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    env = rl.prompts(sums(), max_tokens=1)  # all earn 0
    groups = rl.Groups(batch=2, size=2, keep=[rl.filters.not_all_equal], refill=True)
    report = rl.train(fresh(service), env, steps=1, groups=groups, budget_usd=0.0001, sinks=[])
    assert (report.ended, report.steps) == ("budget", [])
    assert (
        "8 groups in a row were rejected by 'not_all_equal'; the last had rewards from 0 to 0"
        in warned(caplog, "rejected")[0]
    )


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


@pytest.mark.parametrize("weight", [1.0, 0.01])
def test_a_loss_is_the_mean_whatever_data_weigh(service: weft.ServiceClient, weight: float) -> None:
    run = fresh(service)
    tokens = run.get_tokenizer().encode("3 + 5 = 8")
    inputs = {"target_tokens": tokens[1:], "weights": [weight] * (len(tokens) - 1)}
    data = [weft.Datum(weft.ModelInput.from_ints(tokens[:-1]), inputs)]
    nll = run.forward(data, "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"].to_numpy()
    report = rl.sft(run, data, test=data, every=1, batch=1, learning_rate=0.0, sinks=[])
    assert report.steps[0]["loss"] == pytest.approx(-nll.mean(), rel=1e-5)
    assert report.steps[0]["test/loss"] == pytest.approx(-nll.mean(), rel=1e-5)


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


@pytest.mark.parametrize("kind", ["train", "sft"])
@pytest.mark.parametrize("rate", [-1e-4, float("nan")])
def test_a_rate_that_is_none_ends_the_loop_and_leaves_no_gradient(
    service: weft.ServiceClient, rate: float, kind: str
) -> None:
    run, numbers = fresh(service), itertools.count()
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "8"}]
    more: dict[str, Any] = {"learning_rate": lambda step: rate if step else 1e-4, "sinks": []}

    def go() -> None:
        if kind == "sft":
            rl.sft(run, rl.conversations([talk], run.get_tokenizer()), batch=1, epochs=2, **more)
        else:
            env = rl.prompts(sums(4), lambda text, task: next(numbers), max_tokens=2)
            rl.train(run, env, steps=2, groups=SMALL, **more)

    with pytest.raises(ValueError, match="learning_rate: input should be"):
        go()
    update = run.optim_step(weft.AdamParams(learning_rate=0.0)).result(60)
    assert update.metrics is not None
    assert update.metrics["grad_norm:mean"] == 0


def test_pairs_may_be_held_against_another_reference(service: weft.ServiceClient) -> None:
    run = fresh(service)
    pairs = rl.pairs(rows(4), run.get_tokenizer())
    base = service.create_sampling_client(base_model="weft/tiny-moe")
    rl.dpo(run, pairs, reference=base, batch=4, epochs=3, learning_rate=1e-3, sinks=[])
    now = run.save_weights_and_get_sampling_client().result(60)
    again = rl.dpo(run, pairs, reference=now, batch=4, learning_rate=1e-6, sinks=[])
    assert again.steps[0]["margin"] == pytest.approx(0, abs=1e-4)  # unchanged since this reference


class MadeWhenAskedFor(Sequence[Pair]):
    """Makes each pair anew when asked for it, possibly at the address of an earlier one that is gone."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs, self._places = pairs, set[int]()

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> Any:
        tried = [Pair(*self._pairs[index].data)]
        while id(tried[-1]) not in self._places and len(tried) < 1000:
            tried.append(Pair(*self._pairs[index].data))
        self._places.add(id(tried[-1]))
        return tried[-1]


def test_a_pair_is_held_against_its_own_reference_however_long_it_lasts(service: weft.ServiceClient) -> None:
    run = fresh(service)
    pairs = MadeWhenAskedFor(rl.pairs(rows(6), run.get_tokenizer()))
    base = service.create_sampling_client(base_model="weft/tiny-moe")
    report = rl.dpo(run, pairs, reference=base, batch=1, epochs=2, learning_rate=0.0, sinks=[])
    assert report.curve("margin") == pytest.approx([0.0] * 12, abs=1e-4)
