"""Which learning rate? Three runs train at the same time on one server; the script ends in a picture.

    pip install matplotlib
    python examples/sweep.py --plot sweep.png                   # words, spelled
    python examples/sweep.py --plot sweep.png --data my.jsonl   # one {"messages": [...]} a line

One in five conversations is kept for the test, which is scored four times (dots in the picture).
"""

from __future__ import annotations

import argparse
import builtins
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws without a screen
import matplotlib.pyplot as plt
import weft
from weft import rl

RATES = (3e-4, 1e-3, 3e-3)
BATCH = 16


def conversations() -> list[Any]:
    words = sorted({name.lower() for name in dir(builtins) if name.isalpha()})
    return [
        [{"role": "user", "content": f"Spell {word}."}, {"role": "assistant", "content": " ".join(word)}]
        for word in words
    ]


def trained(service: weft.ServiceClient, base_model: str, talks: list[Any], rate: float, epochs: float) -> rl.Report:
    """One run of the sweep; all see the same batches."""
    run = service.create_lora_training_client(base_model, rank=16, seed=0, name=f"sweep {rate:g}")
    data = rl.conversations(talks, run.get_tokenizer(), max_length=256)
    cut = len(data) // 5
    test, data = data[:cut], data[cut:]
    every = max(1, int(len(data) * epochs / BATCH) // 4)
    return rl.sft(run, data, test=test, every=every, batch=BATCH, epochs=epochs, learning_rate=rate, sinks=())


def draw(reports: dict[float, rl.Report], file: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for rate, report in reports.items():
        label = f"{rate:g}: ${report.spent_nusd / 1e9:.4f}"
        (line,) = axes.plot([step["loss"] for step in report.steps], label=label)
        tested = [(step, found["test/loss"]) for step, found in enumerate(report.steps) if "test/loss" in found]
        axes.plot(*zip(*tested, strict=True), "o", color=line.get_color())
    axes.set(xlabel="step", ylabel="loss per token (dots: test)", ylim=(0, None))
    axes.legend(title="learning rate: cost")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="weft/tiny-moe")
    parser.add_argument("--data", type=Path, help="a JSONL of conversations; default: words, spelled")
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--plot", type=Path, default=Path("sweep.png"))
    args = parser.parse_args()
    lines = args.data.read_text().splitlines() if args.data else []
    talks = [json.loads(line)["messages"] for line in lines if line.strip()] or conversations()
    random.Random(0).shuffle(talks)
    with weft.ServiceClient() as service, ThreadPoolExecutor() as pool:
        waiting = {rate: pool.submit(trained, service, args.base_model, talks, rate, args.epochs) for rate in RATES}
        reports = {rate: run.result() for rate, run in waiting.items()}
    draw(reports, args.plot)
    print({rate: round(report.curve("test/loss")[-1], 3) for rate, report in reports.items()}, args.plot)


if __name__ == "__main__":
    main()
