"""An agent of one's own, trained: it guesses, is told higher or lower, and guesses again.

    python examples/rl_agent.py --steps 30
    python examples/rl_agent.py --steps 30 --plot agent.png     # pip install matplotlib

The reward is 1 for a right first answer, less for each try after it. All turns of a rollout are one conversation,
whose exact tokens become one datum (docs/rl.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path
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


def draw(report: rl.Report, file: Path) -> None:
    """Reward, and how many tries it took; what the steps cost is below."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a screen
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    for one, name in zip(axes, ("reward", "tries"), strict=True):
        one.plot(report.curve(name))
        one.set(xlabel="step", ylabel=name)
        one.grid(alpha=0.3)
    figure.suptitle(f"${report.spent_nusd / 1e9:.4f}", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="weft/tiny-moe")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plot", type=Path, help="draw reward and tries here")
    args = parser.parse_args()
    with weft.ServiceClient() as service:
        run = service.create_lora_training_client(args.base_model, rank=16, seed=0)
        env, groups = rl.function(solve, TASKS, timeout_s=60), rl.Groups(batch=12, size=8)
        report = rl.train(run, env, steps=args.steps, groups=groups, schedule=rl.Async(max_lag=1), learning_rate=1e-3)
        print("reward", [round(reward, 2) for reward in report.curve("reward")])
        if args.plot:
            draw(report, args.plot)


if __name__ == "__main__":
    main()
