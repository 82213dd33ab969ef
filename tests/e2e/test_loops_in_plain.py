"""The loops of `weft.rl` do what the papers' formulas say: after three steps the weights equal those of the same
training in float64 by plain torch, transformers and peft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import weft
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM
from weft import rl
from weft.rl.loops.batch import Batch
from weft.rl.rollout import Group, Rollout, Turn
from weft.types import AdamParams

from tests.e2e.conftest import BASE_MODEL, Weftd
from workers.model.tiny import TINY_PATH

pytestmark = pytest.mark.server

STEPS, RATE = 3, 2e-2
#: With such a large eps and no clipping, a wrong factor shows in the weights.
ADAM = AdamParams(eps=1e-2, weight_decay=0.1)
TASKS = [{"prompt": f"What is {a} + {a}?", "answer": str(2 * a)} for a in range(1, 4)]


class InPlain:
    """A run's present adapter, in peft and float64."""

    def __init__(self, run: weft.TrainingClient, folder: Path) -> None:
        saved = run.save_weights_for_sampler(folder.name).result(60)
        run.create_rest_client().download_checkpoint(saved.path, folder).result(60)
        base = AutoModelForCausalLM.from_pretrained(TINY_PATH, dtype=torch.float64, experts_implementation="eager")
        self.model = PeftModel.from_pretrained(base, folder, is_trainable=True, autocast_adapter_dtype=False).eval()
        self.weights = [p for name, p in self.model.named_parameters() if "lora_" in name]
        self.start = self.flat()
        decay, betas = ADAM.weight_decay, (ADAM.beta1, ADAM.beta2)
        self._optimizer = torch.optim.AdamW(self.weights, lr=RATE, betas=betas, eps=ADAM.eps, weight_decay=decay)

    def flat(self) -> Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.weights])

    def logprobs(self, ids: list[int], drawn: Any) -> Tensor:
        """Log-probabilities of the drawn tokens among `ids`."""
        lp = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, :-1], -1)
        own: Tensor = lp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0][torch.tensor(drawn[1:], dtype=torch.bool)]
        return own

    def step(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


@pytest.fixture
def run(weftd: Weftd) -> Iterator[weft.TrainingClient]:
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("in-plain")) as service:
        only = {"train_mlp": False, "train_unembed": False}  # experts share factors here, which peft cannot
        yield service.create_lora_training_client(BASE_MODEL, rank=4, seed=1, **only).result(60)


def assert_same(run: weft.TrainingClient, plain: InPlain, folder: Path) -> None:
    off = (InPlain(run, folder).flat() - plain.flat()).norm()
    moved = (plain.flat() - plain.start).norm()
    assert moved > 0.1
    assert off < 1e-4 * moved


def answered(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Prompt and answer in the model's chat format, and which tokens belong to the answer and its end."""
    read = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    said = tokenizer.encode(f"{answer}<|im_end|>")
    return read + said, [0] * len(read) + [1] * len(said)


def test_sft_is_the_mean_over_the_answers_tokens(run: weft.TrainingClient, tmp_path: Path) -> None:
    tokenizer, plain = run.get_tokenizer(), InPlain(run, tmp_path / "start")
    talks = [
        [{"role": "user", "content": each["prompt"]}, {"role": "assistant", "content": each["answer"] * 3 * n}]
        for n, each in enumerate(TASKS)  # the first answer is empty
    ]
    rate = rl.linear(2 * RATE, steps=4, warmup=1)
    report = rl.sft(run, rl.conversations(talks, tokenizer), epochs=STEPS, learning_rate=rate, optim=ADAM, sinks=[])
    data = [answered(tokenizer, talk[0]["content"], talk[1]["content"]) for talk in talks]
    for step, lr in enumerate((2 * RATE, 2 * RATE, 4 / 3 * RATE)):
        loss = -torch.cat([plain.logprobs(*each) for each in data]).mean()
        assert report.steps[step]["loss"] == pytest.approx(float(loss.detach()), abs=1e-4)
        plain._optimizer.param_groups[0]["lr"] = lr
        plain.step(loss)
    assert_same(run, plain, tmp_path / "end")


def test_dpo_is_its_papers_loss(run: weft.TrainingClient, weftd: Weftd, tmp_path: Path) -> None:
    tokenizer, plain, beta = run.get_tokenizer(), InPlain(run, tmp_path / "start"), 0.5
    rows = [{"prompt": each["prompt"], "chosen": each["answer"], "rejected": "no idea"} for each in TASKS]
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("in-plain")) as service:
        base = service.create_sampling_client(base_model=BASE_MODEL)
        pairs = rl.pairs(rows, tokenizer)
        rl.dpo(run, pairs, reference=base, beta=beta, epochs=STEPS, learning_rate=RATE, optim=ADAM, sinks=[])
    data = [[answered(tokenizer, row["prompt"], row[name]) for name in ("chosen", "rejected")] for row in rows]

    def gaps() -> Tensor:
        sums = [[plain.logprobs(*answer).sum() for answer in pair] for pair in data]
        return torch.stack([chosen - rejected for chosen, rejected in sums])

    before = gaps().detach()
    for _ in range(STEPS):
        plain.step(-torch.nn.functional.logsigmoid(beta * (gaps() - before)).mean())
    assert_same(run, plain, tmp_path / "end")


async def two_turns(task: Any, chat: rl.Chat) -> float:
    said = [(await chat.user(task["prompt"]).sample(max_tokens=4)).turn for _ in range(2)]
    return float(sum(map(sum, (turn.tokens for turn in said))) % 7)


def laid_out(turns: list[Turn]) -> tuple[list[int], list[int], Tensor]:
    """Two turns; the second extends the first: ids, which of them were drawn, and the sampler's logprobs of those."""
    first, second = turns
    one, read = [*first.prompt, *first.tokens], second.prompt[len(first.prompt) + len(first.tokens) :]
    assert list(second.prompt[: len(one)]) == one
    drawn = [0] * len(first.prompt) + [1] * len(first.tokens) + [0] * len(read) + [1] * len(second.tokens)
    return [*one, *read, *second.tokens], drawn, torch.tensor([*first.logprobs, *second.logprobs]).double()


def clipped(lp: Tensor, q: Tensor, advantage: float) -> Tensor:
    ratio = torch.exp(lp - q)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


@pytest.mark.parametrize("schedule", [rl.Sync(), rl.Async(max_lag=1)], ids=["in-turn", "a-step-behind"])
def test_grpo_with_ppos_clip_is_its_papers_loss(
    run: weft.TrainingClient, schedule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of one conversation; advantages from their group's mean and deviation; the mean over all drawn tokens."""
    plain, seen = InPlain(run, tmp_path / "start"), list[list[Group]]()
    made: Callable[..., Any] = Batch.data
    monkeypatch.setattr(Batch, "data", lambda self, *a, **k: seen.append(self.groups) or made(self, *a, **k))
    report = rl.train(
        run,
        rl.function(two_turns, TASKS),
        steps=STEPS,
        groups=rl.Groups(batch=2, size=3),
        advantage=rl.grpo,
        loss=rl.losses.ppo(),
        schedule=schedule,
        learning_rate=RATE,
        optim=ADAM,
        sinks=[],
    )
    assert len(seen) == STEPS
    for groups in seen:
        losses = []
        for group in groups:
            rewards: Any = np.asarray([rollout.reward for rollout in group.rollouts])
            for rollout, centred in zip(group.rollouts, rewards - rewards.mean(), strict=True):
                if centred:
                    ids, drawn, q = laid_out(rollout.turns)
                    losses.append(clipped(plain.logprobs(ids, drawn), q, centred / (rewards.std(ddof=1) + 1e-6)))
        plain.step(torch.cat(losses).mean())
    assert max(report.curve("lag/max")) == schedule.max_lag
    assert_same(run, plain, tmp_path / "end")


def test_distillation_weighs_each_token_by_what_the_teacher_has_more(
    run: weft.TrainingClient, weftd: Weftd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, seen = InPlain(run, tmp_path / "start"), list[Rollout]()
    teacher_in_plain, rates = InPlain(run, tmp_path / "teacher"), []
    monkeypatch.setattr(Batch, "metrics", lambda self: seen.extend(self.rollouts) or {})
    with weft.ServiceClient(base_url=weftd.url, api_key=weftd.key("in-plain")) as service:
        teacher = service.create_sampling_client(base_model=BASE_MODEL)
        rl.sft(run, rl.conversations([[{"role": "user", "content": "?"}, {"role": "assistant", "content": "8"}]],
               run.get_tokenizer()), learning_rate=RATE, optim=ADAM, sinks=[])  # fmt: skip
        plain.step(-plain.logprobs(*answered(run.get_tokenizer(), "?", "8")).mean())
        groups = rl.Groups(batch=2, size=2)
        env = rl.function(two_turns, TASKS)
        report = rl.distill(run, env, teacher, steps=STEPS, groups=groups, learning_rate=RATE, optim=ADAM, sinks=[])
    for step in range(STEPS):
        losses, gaps = [], []
        for rollout in seen[4 * step : 4 * step + 4]:
            ids, drawn, q = laid_out(rollout.turns)
            gap = teacher_in_plain.logprobs(ids, drawn).detach() - q
            losses.append(-torch.exp(plain.logprobs(ids, drawn) - q) * gap)
            gaps.append(gap)
        rates.append(-float(torch.cat(gaps).mean()))
        plain.step(torch.cat(losses).mean())
    assert report.curve("reverse_kl") == pytest.approx(rates, abs=1e-4)
    assert_same(run, plain, tmp_path / "end")
