"""Reinforcement learning with a verifiable reward: small sums, group-relative advantages, importance sampling.

    python examples/rl_arithmetic.py --steps 25

Each step samples every question GROUP times, rewards the right answer with 1, takes the reward minus its group's mean
as the advantage of every token of that sample (GRPO without the division by the standard deviation: Dr. GRPO,
arXiv 2503.20783), and takes one optimizer step on the sum. A group whose samples all earn the same gives no
gradient and is left out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import weft
from weft import types

QUESTIONS = 24
GROUP = 8
LEARNING_RATE = 1e-3
RANK = 16
MAX_TOKENS = 6

Step = dict[str, Any]


def ask(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return f"What is {a} + {b}?", str(a + b)


def reward(text: str, answer: str) -> float:
    return float(text.replace("<|im_end|>", "").strip() == answer)


def datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """One sample as training data: position i of the input predicts target i; the prompt has advantage 0."""
    tokens = prompt + list(sequence.tokens)
    masked = len(prompt) - 1
    logprobs = [0.0] * masked + list(sequence.logprobs or [])
    advantages = [0.0] * masked + [advantage] * len(sequence.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages},
    )


def run(
    service: weft.ServiceClient, base_model: str, steps: int, seed: int = 0, on_step: Callable[[Step], None] = print
) -> str:
    """Train for `steps` steps, reporting each to `on_step`. Returns the id of the run."""
    rng = random.Random(seed)
    training = service.create_lora_training_client(base_model=base_model, rank=RANK, seed=seed).result()
    tokenizer = training.get_tokenizer()
    sampler = training.save_weights_and_get_sampling_client().result()
    for step in range(steps):
        asked = [ask(rng) for _ in range(QUESTIONS)]
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
            )
            for q, _ in asked
        ]
        futures = [
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                GROUP,
                types.SamplingParams(
                    max_tokens=MAX_TOKENS, temperature=1.0, seed=(seed * steps + step) * QUESTIONS + i
                ),
            )
            for i, prompt in enumerate(prompts)
        ]
        data, rewards = [], []
        for prompt, (_, answer), future in zip(prompts, asked, futures, strict=True):
            sequences = future.result().sequences
            earned = [reward(tokenizer.decode(s.tokens), answer) for s in sequences]
            mean = sum(earned) / len(earned)
            rewards += earned
            data += [datum(prompt, s, r - mean) for s, r in zip(sequences, earned, strict=True) if r != mean]
        if data:
            backward = training.forward_backward(data, "importance_sampling")
            update = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
            backward.result()
            update.result()
            sampler = training.save_weights_and_get_sampling_client().result()
        weft.log(training, {"reward": sum(rewards) / len(rewards), "data": len(data)}, step=step)
        on_step({"step": step, "of": steps, "reward": sum(rewards) / len(rewards), "data": len(data)})
    return training.model_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="weft/tiny-moe")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with weft.ServiceClient() as service:
        run(service, args.base_model, args.steps, args.seed)


if __name__ == "__main__":
    main()
