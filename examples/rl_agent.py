"""An agent of one's own, trained: it guesses, is told higher or lower, and guesses again.

    python examples/rl_agent.py --steps 30

The reward is 1 for a right first answer, less for each try after it. All turns of a rollout are one conversation,
whose exact tokens become one datum (docs/rl.md).
"""

from __future__ import annotations

import argparse
from typing import Any

import weft
from weft import rl

TASKS = [{"prompt": f"What is {a} + {b}?", "answer": a + b} for a in range(1, 10) for b in range(1, 10)]


async def solve(task: Any, chat: rl.Chat) -> rl.Reward:
    question = task["prompt"]
    for tries in range(1, 4):
        text = (await chat.user(question).sample(max_tokens=6)).text.strip()
        if text == str(task["answer"]):
            return rl.Reward(1 / tries, {"tries": tries, "right": 1.0})
        hint = ("Higher." if int(text) < task["answer"] else "Lower.") if text.isdecimal() else "A number, please."
        question = f"{hint} {task['prompt']}"
    return rl.Reward(0.0, {"tries": 3, "right": 0.0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="weft/tiny-moe")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    with weft.ServiceClient() as service:
        run = service.create_lora_training_client(args.base_model, rank=16, seed=0)
        env, groups = rl.function(solve, TASKS, timeout_s=60), rl.Groups(batch=12, size=8)
        report = rl.train(run, env, steps=args.steps, groups=groups, schedule=rl.Async(max_lag=1), learning_rate=1e-3)
        print("reward", [round(reward, 2) for reward in report.curve("reward")])


if __name__ == "__main__":
    main()
