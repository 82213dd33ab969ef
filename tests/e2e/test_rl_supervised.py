"""`rl.sft`, `rl.dpo` and `rl.distill` on a real service: what a step is, and that it is learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import weft
from weft import rl
from weft.rl.supervised.dpo import Pair
from weft.rl.supervised.sft import nll
from weft.types import AdamParams, ModelInput

from tests.e2e.conftest import BASE_MODEL
from tests.e2e.rl_tasks import ONE_TURN, fresh, rows, sums

pytestmark = pytest.mark.server


def test_dpo_is_torchs_gradient_and_learns_the_preference(service: weft.ServiceClient) -> None:
    beta = 0.3
    base = service.create_sampling_client(base_model=BASE_MODEL)
    probe = rl.pairs(rows(1), base.get_tokenizer())[0].chosen
    after = []
    for ours in (True, False):
        run = fresh(service, seed=3)
        some = rl.pairs(rows(4), run.get_tokenizer())
        if ours:
            report = rl.dpo(run, some, reference=base, beta=beta, batch=4, learning_rate=1e-3, sinks=[])
            assert report.curve("loss") == pytest.approx([np.log(2)], abs=1e-5)
            assert report.spent_nusd >= run.cost().result(60).total_nusd
        else:
            references = [pair_logprobs(base, pair) for pair in some]

            def loss(data: Any, logprobs: Any, references: Any = references) -> Any:
                h = []
                for i, (chosen, rejected) in enumerate(references):
                    got = [
                        (logprobs[2 * i + j] * data[2 * i + j].loss_fn_inputs["weights"].to_torch()).sum()
                        for j in (0, 1)
                    ]
                    h.append(beta * ((got[0] - chosen) - (got[1] - rejected)))
                return -torch.nn.functional.logsigmoid(torch.stack(h)).mean(), {}

            run.forward_backward_custom([datum for pair in some for datum in pair.data], loss).result(60)
            run.optim_step(AdamParams(learning_rate=1e-3)).result(60)
        after.append(run.forward([probe], "cross_entropy").result(60).loss_fn_outputs[0]["logprobs"].to_numpy())
    np.testing.assert_allclose(after[0], after[1], atol=2e-5)
    run = fresh(service)
    report = rl.dpo(
        run, rl.pairs(rows(32), run.get_tokenizer()), reference=base, batch=8, epochs=2, learning_rate=1e-3, sinks=[]
    )
    assert report.steps[-1]["accuracy"] > 0.9
    assert report.steps[-1]["loss"] < 0.6


def pair_logprobs(sampler: weft.SamplingClient, pair: Any) -> list[float]:
    found = []
    for datum in pair.data:
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy().tolist()
        weights = datum.loss_fn_inputs["weights"].to_numpy().tolist()
        whole = ModelInput.from_ints([*datum.model_input.to_ints(), targets[-1]])
        logprobs = sampler.compute_logprobs(whole).result(60)
        found.append(sum(lp * w for lp, w in zip(logprobs[1:], weights, strict=True) if lp is not None))
    return found


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


def test_sft_then_distillation_to_it_halves_the_reverse_kl(service: weft.ServiceClient) -> None:
    teacher_run = fresh(service, seed=1, rank=16)
    talks = [
        [{"role": "user", "content": s["prompt"]}, {"role": "assistant", "content": s["answer"]}] for s in sums(96)
    ]
    data = rl.conversations(talks, teacher_run.get_tokenizer())
    report = rl.sft(
        teacher_run, data, test=data[:16], every=6, batch=16, epochs=3, learning_rate=rl.linear(2e-3, 18), sinks=[]
    )
    assert report.steps[-1]["loss"] < 0.5 * report.steps[0]["loss"]
    assert len(report.curve("test/loss")) == 3
    short = rl.sft(teacher_run, data, test=data[:16], batch=32, epochs=1, learning_rate=0.0, sinks=[])
    assert ["test/loss" in step for step in short.steps] == [False] * (len(short.steps) - 1) + [True]
    teacher = teacher_run.save_weights_and_get_sampling_client().result(60)
    student = fresh(service, seed=2, rank=16)
    report = rl.distill(
        student, ONE_TURN, teacher, steps=10, groups=rl.Groups(batch=8, size=4), learning_rate=2e-3, sinks=[]
    )
    gaps = report.curve("reverse_kl")
    assert sum(gaps[-3:]) < 0.5 * sum(gaps[:3])


def test_what_a_teacher_cannot_read_with_its_hint_is_left_out_of_a_distillation(
    service: weft.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A rollout may fill the context, so that it does not fit with the hint; steps on the others are paid for."""
    asked = [{"prompt": "?", "answer": ""}, {"prompt": "word " * 1500, "answer": ""}]
    hint = [{"role": "system", "content": "word " * 600}]
    teacher = service.create_sampling_client(base_model=BASE_MODEL)
    env, groups = rl.prompts(asked, max_tokens=4), rl.Groups(batch=2, size=2)
    report = rl.distill(fresh(service), env, teacher, hint=lambda task: hint, steps=2, groups=groups, sinks=[])
    assert [step["data"] for step in report.steps] == [2, 2]
    assert [step["too_long_for_teacher"] for step in report.steps] == [2, 2]
    assert "the teacher takes 2048 tokens, and a rollout with its hint has" in caplog.text


def test_data_that_are_fewer_than_a_batch_are_each_in_it_once(service: weft.ServiceClient) -> None:
    """As in a DataLoader of torch: the step is on the mean over the data, and an epoch is one step."""
    run = fresh(service)
    answers = ["8", "It is nine, I think.", "ten"]
    talks = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}] for answer in answers]
    data = rl.conversations(talks, run.get_tokenizer())
    expected = nll(run, data)
    report = rl.sft(run, data, epochs=2, sinks=[])
    assert len(report.steps) == 2
    assert report.steps[0]["loss"] == pytest.approx(expected, rel=1e-6)
    assert report.steps[0]["tokens"] == sum(float(d.loss_fn_inputs["weights"].to_numpy().sum()) for d in data)


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
