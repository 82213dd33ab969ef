"""How well a model does small sums, worked out exactly instead of sampled.

Asked `What is a + b?`, a model's chance at temperature 1 of saying exactly the right number and stopping is the
product of the probabilities of the answer's tokens and `<|im_end|>`. Called by `pretrain.py` and the tests.
"""

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from tools.tiny_model.corpus import chat

DIGIT_PAIRS = [(a, b) for a in range(10) for b in range(10)]


@dataclass(frozen=True)
class SumAccuracy:
    """Shares of right answers: `sampled` at temperature 1, `greedy` at temperature 0."""

    sampled: float
    greedy: float


def sum_prompt(a: int, b: int) -> str:
    """The question for a sum, up to where the answer starts."""
    return chat([("user", f"What is {a} + {b}?")]) + "<|im_start|>assistant\n"


@torch.no_grad()
def sum_accuracy(model: Any, tokenizer: Tokenizer, pairs: list[tuple[int, int]] = DIGIT_PAIRS) -> SumAccuracy:
    """Accuracy of `model` (a transformers causal LM) over the sums `pairs`, no randomness involved."""
    was_training = model.training
    model.eval()
    rows = [_score(model, tokenizer, a, b) for a, b in pairs]
    model.train(was_training)
    return SumAccuracy(sum(p for p, _ in rows) / len(rows), sum(hit for _, hit in rows) / len(rows))


def _score(model: Any, tokenizer: Tokenizer, a: int, b: int) -> tuple[float, bool]:
    """The probability of the right answer, and whether greedy decoding gives it."""
    prompt = tokenizer.encode(sum_prompt(a, b)).ids
    answer = tokenizer.encode(f"{a + b}<|im_end|>").ids
    logits_TV = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    target_T = torch.tensor(answer)
    logprob_T = logits_TV.log_softmax(-1).gather(1, target_T[:, None])
    return float(logprob_T.sum().exp()), bool((logits_TV.argmax(-1) == target_T).all())
