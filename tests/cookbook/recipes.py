"""The recipes that are run, their arguments, and the metrics by which one sees that they did something."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cookbook.environment import HYBRID, MODEL, OTHERS, environment
from tests.e2e.conftest import Weftd

LIMIT_S = 240
_RECIPES = "tinker_cookbook.recipes"
_RL = ("group_size=4", "groups_per_batch=4", "max_steps=2", "eval_every=0", "lora_rank=8", "max_tokens=5")
_SUMS = (f"{_RECIPES}.math_rl.train", "env=arithmetic", *_RL)
_ARITHMETIC = (*_SUMS, "renderer_name=qwen3_disable_thinking")
_HYBRID_SUMS = (*_SUMS, "renderer_name=qwen3_5_disable_thinking")


@dataclass(frozen=True)
class Recipe:
    """A module of the cookbook with its command line, or one of our scripts around its functions (`loops.py`)."""

    name: str
    command: tuple[str, ...]
    ours: bool = False
    in_ci: bool = False
    #: The least number of lines of metrics that it must leave.
    steps: int = 2
    model: str = MODEL


RECIPES = (
    Recipe("sl_loop", (f"{_RECIPES}.sl_loop", "batch_size=4", "max_steps=2", "lora_rank=8"), in_ci=True),
    Recipe(
        "rl_loop",
        (f"{_RECIPES}.rl_loop", "batch_size=2", "group_size=4", "max_steps=2", "max_tokens=8", "lora_rank=8"),
    ),
    Recipe(
        "rl_loop, importance_sampling",
        (
            *(f"{_RECIPES}.rl_loop", "batch_size=2", "group_size=4", "max_steps=2", "max_tokens=8", "lora_rank=8"),
            "loss_fn=importance_sampling",
        ),
    ),
    Recipe("supervised.train", ("supervised",), ours=True),
    Recipe("rl.train: math_rl arithmetic", _ARITHMETIC),
    Recipe("rl.train: math_rl arithmetic, Qwen3.5", _HYBRID_SUMS, model=HYBRID),
    *(
        Recipe(f"rl.train: math_rl arithmetic, {family}", (*_SUMS, "renderer_name=role_colon"), model=model)
        for family, (model, _) in OTHERS.items()
    ),
    Recipe("rl.train: KL penalty, two substeps, post-KL", ("kl",), ours=True),
    Recipe("rl.train: asynchronous", (*_ARITHMETIC, "max_steps_off_policy=1")),
    Recipe("rl.train: asynchronous, Qwen3.5", (*_HYBRID_SUMS, "max_steps_off_policy=1"), in_ci=True, model=HYBRID),
    Recipe(
        "rl.train: streamed minibatches",
        (
            *_ARITHMETIC,
            *("stream_minibatch_config.groups_per_batch=4", "stream_minibatch_config.num_minibatches=2"),
        ),
    ),
    Recipe("preference DPO", ("dpo",), ours=True),
    Recipe(
        "on-policy distillation",
        (
            f"{_RECIPES}.distillation.on_policy_distillation",
            *("dataset=deepmath", f"teacher_model={MODEL}", "renderer_name=qwen3_disable_thinking"),
            *("group_size=2", "groups_per_batch=2", "max_tokens=8", "max_steps=2", "lora_rank=8", "eval_every=0"),
        ),
    ),
    Recipe(
        "guess_number",
        (
            f"{_RECIPES}.multiplayer_rl.guess_number.train",
            *("renderer_name=qwen3_disable_thinking", "group_size=2", "batch_size=2", "max_steps=2", "max_tokens=8"),
            "eval_every=0",
        ),
    ),
    Recipe("weights.download and build_hf_model", ("weights",), ours=True, steps=0),
)


def run(recipe: Recipe, python: Path, server: Weftd, folder: Path) -> None:
    """Run the recipe in `folder` (see `environment.shadow`). Raises AssertionError with the end of its output."""
    logs = folder / "logs" / recipe.name.replace(" ", "-")
    if recipe.ours:
        command = [str(python), str(Path(__file__).with_name("loops.py")), *recipe.command, recipe.model, str(logs)]
    else:
        command = [str(python), "-m", *recipe.command, f"model_name={recipe.model}", f"log_path={logs}"]
    done = subprocess.run(
        command, cwd=folder, env=environment(server), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{recipe.name}: {(done.stdout + done.stderr)[-3000:]}"
    if recipe.steps:
        lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
        assert len(lines) >= recipe.steps, f"{recipe.name} left {len(lines)} lines of metrics"
