"""What a mismatch of sampler and trainer does to RL, and what holds against it.

    python bench/mismatch.py [--json] [--plot FILE] [--quick] [--followed]

Drift: a `weftd` with the built-in model, whose generator has other base weights than its trainer: Gaussian noise of
NOISE times the standard deviation of each matrix, the same from beginning to end. RL on sums with each of LOSSES, from
the same weights and tasks: unclipped importance sampling; PPO whose ratio is to the trainer before the batch, which
bounds what the steps do and knows nothing of the sampler; IcePop, with that ratio and one to the sampler. What may
drift is the mismatch KL before the first step on a batch, when nothing but the noise tells trainer and sampler apart:
the mean of rho - 1 - log rho over drawn tokens, rho = trainer / sampler. Beside it: without noise, and with one
optimizer step for each batch.

Routing: the built-in mixture of experts in this process, sampled by the generator's engine. Noise of a given size is
added to what its routers choose by ("rounding", as an engine that computes in another precision, or in another order,
has it), or to their weights ("weights"). The trainer's decoder, which has no noise, reads the same tokens, with its own
choice of experts and with the sampler's (`routed_experts`).

--followed: the first of these alone, with a sampler that beside its noise takes FOLLOWED of each adapter's scale, as
one does that loses part of every update: what is off then grows with what is learned.
--quick shows that the command runs.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import weft
from safetensors.torch import load_file, save_file
from weft import rl
from weft.rl.chat.render import TemplateRenderer
from weft.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData

from api import cli
from api.server.workers import worker_programs
from api.server.workers.worker_process import WorkerProgram
from bench.parts.results import asked, at_least, at_most, claim, machine, tell
from bench.parts.router_noise import mismatch_kl, routing
from bench.parts.serving import BASE_MODEL, make_key, serve
from bench.tables.losses import quarters
from scheduler.links.configs import WorkerConfig
from workers import __main__ as workers
from workers.generator.torch_engine import TorchEngine
from workers.leave import leave
from workers.model.adapters.adapter import Adapter
from workers.model.tiny import TINY_PATH

LOSSES = {
    "importance_sampling": rl.losses.importance_sampling(),
    "ppo": rl.losses.ppo(),
    "icepop": rl.losses.icepop(old=True),
}
NOISE, RATE, RANK, FOLLOWED = 0.1, 1e-3, 16, 0.5
#: Tasks of a batch, rollouts of each task, and optimizer steps on a batch.
BATCH, SIZE, STEPS = 12, 8, 4
#: Seeds other than those with which noise and rate were chosen (0 and 1).
SEEDS = range(10, 16)


@dataclass(frozen=True)
class Setting:
    """The setting of a drift measurement."""

    noise: float
    steps: int
    losses: tuple[str, ...]
    seeds: Sequence[int]
    #: The factor by which the sampler scales each adapter.
    followed: float = 1.0


SETTINGS = {
    "noise": Setting(NOISE, STEPS, tuple(LOSSES), SEEDS),
    "without noise": Setting(0.0, STEPS, ("importance_sampling", "icepop"), SEEDS[:3]),
    "one step": Setting(NOISE, 1, ("importance_sampling", "icepop"), SEEDS[:3]),
}
PARTLY = {"noise, part of each update": Setting(NOISE, STEPS, tuple(LOSSES), SEEDS, FOLLOWED)}


def disturbed(folder: Path, noise: float) -> None:
    """The built-in model, with noise on each matrix of this share of its standard deviation."""
    shutil.copytree(TINY_PATH, folder)
    generator = torch.Generator().manual_seed(0)
    for file in sorted(folder.glob("*.safetensors")):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.ndim > 1:
                added = noise * weight.float().std() * torch.randn(weight.shape, generator=generator)
                weights[name] = (weight + added).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})


def serve_with(followed: str, sampler: Path, arguments: Sequence[str]) -> None:
    """`weftd serve`, whose generator reads the base model from the folder `sampler`."""
    generator, program = worker_programs._generator, worker_programs._program

    def programmed(role: str, config: WorkerConfig) -> WorkerProgram:
        command = [sys.executable, __file__, "--generator", followed, "generator"]
        made = program(role, config)
        return replace(made, command=command, forked=False) if role.startswith("generator") else made

    worker_programs._program = programmed
    worker_programs._generator = lambda settings, models, engine: generator(
        settings, dict.fromkeys(models, sampler), engine
    )
    sys.argv = ["weftd", *arguments]
    cli.main()


def generate(followed: float, arguments: Sequence[str]) -> None:
    """A generator that scales each adapter by this factor."""
    load = TorchEngine._load

    def partly(self: TorchEngine, folder: Path) -> tuple[Adapter, int]:
        adapter, version = load(self, folder)
        adapter.scale *= followed
        return adapter, version

    TorchEngine._load = partly  # type: ignore[method-assign]
    leave(workers.main(arguments))


class Drift:
    """One run of RL."""

    def __init__(self, service: weft.ServiceClient, name: str, seed: int, steps: int) -> None:
        self.name, self.loss, self.seed, self.steps = name, LOSSES[name], seed, steps
        self.draw = random.Random(seed)
        self.run = service.create_lora_training_client(BASE_MODEL, rank=RANK, seed=seed).result()
        making = self.loss.made(self.run)
        self.handle = making.result() if making is not None else None
        self.renderer = TemplateRenderer(self.run.get_tokenizer())

    def group(self, sampler: weft.SamplingClient, seed: int) -> Callable[[], list[rl.Rollout]]:
        """Start rollouts of one task."""
        a, b = self.draw.randint(1, 9), self.draw.randint(1, 9)
        asked = [{"role": "user", "content": f"What is {a} + {b}?"}]
        prompt = self.renderer.render_ids(asked, add_generation_prompt=True)
        drawing = sampler.sample(ModelInput.from_ints(prompt), SIZE, SamplingParams(max_tokens=6, seed=seed))

        def ended() -> list[rl.Rollout]:
            found = []
            for sequence in drawing.result().sequences:
                said = self.renderer.parse_response(list(sequence.tokens)).content
                turn = rl.Turn(tuple(prompt), tuple(sequence.tokens), tuple(sequence.logprobs or ()))
                found.append(rl.Rollout([turn], float(said.strip() == str(a + b))))
            return found

        return ended

    def batch(self, number: int) -> dict[str, float]:
        """Sample a batch and take its steps; returns the mean reward, and the mismatch KL before the first step and at
        the last."""
        sampler = self.run.save_weights_and_get_sampling_client().result()
        under_way = [self.group(sampler, (self.seed * 1000 + number) * BATCH + each) for each in range(BATCH)]
        groups = [ended() for ended in under_way]
        drawn = sum(rollout.sampled for group in groups for rollout in group)
        data = []
        for group in groups:
            for rollout, advantage in zip(group, rl.dr_grpo([each.reward for each in group]), strict=True):
                data += rl.data_of(rollout, advantage)
        olds = self.scores(data)
        sent = [self.datum(datum, old, drawn) for datum, old in zip(data, olds, strict=True)]
        for _ in range(self.steps):
            backward = self.loss.forward_backward(self.run, sent, self.handle)
            self.run.optim_step(AdamParams(learning_rate=RATE))
        last = [output["logprobs"].to_numpy() for output in backward.result().loss_fn_outputs]
        rewards = [rollout.reward for group in groups for rollout in group]
        kls = {"mismatch_kl": mismatch_of(data, olds), "last_kl": mismatch_of(data, last)}
        return {"reward": fmean(rewards), **kls}

    def datum(self, datum: Datum, old: np.ndarray, drawn: int) -> Datum:
        if self.name == "ppo":
            own = TensorData.from_numpy(old * datum.loss_fn_inputs["mask"].to_numpy())
            datum = Datum(datum.model_input, {**datum.loss_fn_inputs, "logprobs": own})
        return self.loss.datum(datum, 1 / drawn, **({"old": old} if "old" in self.loss.reads else {}))

    def scores(self, data: Sequence[Datum]) -> list[np.ndarray]:
        """The logprobs of the trainer's present weights."""
        asked = [
            Datum(datum.model_input, {"target_tokens": given["target_tokens"], "weights": given["mask"]})
            for datum in data
            if (given := datum.loss_fn_inputs)
        ]
        outputs = self.run.forward(asked, "cross_entropy").result().loss_fn_outputs
        return [output["logprobs"].to_numpy() for output in outputs]


def mismatch_of(data: Sequence[Datum], scores: Sequence[np.ndarray]) -> float:
    """Mismatch KL over the drawn tokens."""
    gaps = [
        (score - given["logprobs"].to_numpy())[given["mask"].to_numpy() == 1]
        for score, given in zip(scores, (datum.loss_fn_inputs for datum in data), strict=True)
    ]
    return mismatch_kl(np.concatenate(gaps).astype(np.float64))


def drift(setting: Setting, batches: int) -> dict[str, dict[str, list[list[float]]]]:
    """For each loss: the results of `Drift.batch`, by seed and batch. All runs go side by side."""
    with tempfile.TemporaryDirectory(prefix="weft-mismatch-") as temporary:
        folder = Path(temporary, "model")
        disturbed(folder, setting.noise)
        program = (sys.executable, __file__, "--serve", str(setting.followed), str(folder))
        with (
            serve(program=program) as (url, data_dir),
            weft.ServiceClient(base_url=url, api_key=make_key(data_dir, "bench")) as service,
            ThreadPoolExecutor(len(setting.losses) * len(setting.seeds)) as threads,
        ):
            runs = [Drift(service, name, seed, setting.steps) for name in setting.losses for seed in setting.seeds]
            curves: list[list[dict[str, float]]] = [[] for _ in runs]
            for number in range(batches):
                for curve, point in zip(curves, threads.map(lambda run: run.batch(number), runs), strict=True):  # noqa: B023
                    curve.append(point)
                print(number, [round(curve[-1]["mismatch_kl"], 4) for curve in curves], file=sys.stderr, flush=True)
    return {
        name: {
            what: [
                [point[what] for point in curve] for run, curve in zip(runs, curves, strict=True) if run.name == name
            ]
            for what in ("reward", "mismatch_kl", "last_kl")
        }
        for name in setting.losses
    }


def growth(drifted: dict[str, Any], loss: str) -> float:
    first, last = quarters(drifted[loss]["mismatch_kl"])
    return last / first


def final(drifted: dict[str, Any], loss: str, what: str) -> float:
    """Mean over all seeds and the last quarter of the batches."""
    return quarters(drifted[loss][what])[1]


def drifts(drifted: dict[str, Any], loss: str, past: bool) -> dict[str, Any]:
    """The claim that the mismatch KL of this loss grows `past` twice its first value, or does not."""
    grown, goal = growth(drifted, loss), "grows past" if past else "stays below"
    return claim(f"mismatch KL of {loss}, last quarter / first, {goal}", grown, 2.0, (grown > 2.0) == past)


def ends_higher(drifted: dict[str, Any], loss: str) -> dict[str, Any]:
    ahead = final(drifted, loss, "reward") - final(drifted, "importance_sampling", "reward")
    return claim(f"final reward of {loss} less that of importance_sampling", ahead, 0.0, ahead >= 0)


def claims_of_drift(drifted: dict[str, Any]) -> list[dict[str, Any]]:
    apart = final(drifted, "importance_sampling", "mismatch_kl") / final(drifted, "icepop", "mismatch_kl")
    return [
        drifts(drifted, "importance_sampling", True),
        drifts(drifted, "icepop", False),
        at_least("mismatch KL of importance_sampling / icepop, last quarter", apart, 2.0),
        ends_higher(drifted, "icepop"),
    ]


def claims_of_following(drifted: dict[str, Any]) -> list[dict[str, Any]]:
    apart = growth(drifted, "importance_sampling") / growth(drifted, "icepop")
    return [
        drifts(drifted, "importance_sampling", True),
        at_least("the same, / that of icepop", apart, 2.0),
        drifts(drifted, "icepop", False),
        drifts(drifted, "ppo", False),
        ends_higher(drifted, "icepop"),
        ends_higher(drifted, "ppo"),
    ]


def claims_of_routing(routed: dict[str, Any]) -> list[dict[str, Any]]:
    worst = routed["rounding"][-1]
    found = [claim("mismatch KL of the largest rounding", worst["free"], 1e-4, worst["free"] > 1e-4)]
    highest = max(point["replayed"] for point in routed["rounding"])
    return [*found, at_most("the same with routing replay, at most", highest, 1e-10)]


def plot(result: dict[str, Any], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2))
    for ax, what in ((left, "mismatch_kl"), (middle, "reward")):
        for (loss, runs), colour in zip(result["drift"]["noise"].items(), ("C3", "C4", "C0"), strict=True):
            for run in runs[what]:
                ax.plot(run, colour, alpha=0.2, linewidth=0.7)
            ax.plot([fmean(step) for step in zip(*runs[what], strict=True)], colour, label=loss)
        ax.set(xlabel=f"batch, of {STEPS} optimizer steps", ylabel=what.replace("_kl", " KL before the first step"))
        ax.grid(alpha=0.3)
    left.set_yscale("log")
    middle.legend(fontsize=7)
    for (kind, points), colour in zip(result["routing"].items(), ("C1", "C2"), strict=True):
        for name, style in (("free", "o-"), ("replayed", "s--")):
            label = f"{kind}, {'replayed' if name == 'replayed' else 'own choice'}"
            right.plot([p["noise"] for p in points], [max(p[name], 1e-17) for p in points], colour + style, label=label)
    right.set(xscale="log", yscale="log", xlabel="noise of the routers", ylabel="mismatch KL")
    right.grid(alpha=0.3)
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=80)


def main() -> None:
    parser = asked(__doc__, quick="one seed, two batches")
    parser.add_argument("--plot", type=Path, help="draw it here")
    parser.add_argument("--followed", action="store_true", help="a sampler that loses part of every update, alone")
    args = parser.parse_args()
    batches, prompts, settings = 30, 16, PARTLY if args.followed else SETTINGS
    if args.quick:
        batches, prompts = 2, 4
        settings = {name: replace(each, seeds=each.seeds[:1]) for name, each in settings.items()}
    drifted = {name: drift(each, batches) for name, each in settings.items()}
    first = next(iter(drifted.values()))
    routed = {} if args.followed else routing(prompts, 16)
    result = {
        "bench": "mismatch",
        "compares": "losses under noise in the sampler's weights; routing replay under noise in the sampler's routers",
        "machine": machine(),
        "batches": batches,
        "settings": {name: asdict(each) | {"seeds": list(each.seeds)} for name, each in settings.items()},
        "drift": drifted,
        "routing": routed,
        "claims": claims_of_following(first) if args.followed else claims_of_drift(first) + claims_of_routing(routed),
    }
    if args.plot:
        plot(result, args.plot)
    tell(result, args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_with(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    elif sys.argv[1:2] == ["--generator"]:
        generate(float(sys.argv[2]), sys.argv[3:])
    else:
        main()
