"""What a mismatch of sampler and trainer does to RL, and what holds against it.

    python bench/mismatch.py [--json] [--plot FILE] [--quick]

Drift: one `weftd` with the built-in model; RL on sums whose sampler has other weights than the trainer, and whose
batches are each good for several optimizer steps. Before each batch the run is copied, and the copy takes one step of
Adam at NOISE on random tokens of random signs, so that every weight of the sampler is off by about NOISE. Unclipped
importance sampling and IcePop (both ratios: to the sampler, and to the trainer before the batch) begin from the same
weights, tasks and noise, over several seeds. The mismatch KL is the mean of rho - 1 - log rho over drawn tokens, rho =
trainer / sampler, at the last step on each batch.

Routing: the built-in mixture of experts in this process, sampled by the generator's engine. Noise of a given size is
added to what its routers choose by ("rounding", as an engine that computes in another precision, or in another order,
has it), or to their weights ("weights"). The trainer's decoder, which has no noise, reads the same tokens, with its own
choice of experts and with the sampler's (`routed_experts`).

--quick shows that the command runs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import weft
from serving import BASE_MODEL, claim, machine, make_key, serve
from torch import Tensor
from weft import rl
from weft.rl.chat.render import TemplateRenderer
from weft.types import AdamParams, Datum, ModelInput, SamplingParams

from workers.generator.engine import GenerateRequest
from workers.generator.engine import SamplingParams as EngineParams
from workers.generator.torch_engine import TorchEngine
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder, PackedAttend
from workers.model.logprobs import target_logprobs
from workers.model.parts.router import Router
from workers.model.tiny import TINY_PATH

LOSSES = {"importance_sampling": rl.losses.importance_sampling(), "icepop": rl.losses.icepop(old=True)}
NOISE, RATE, RANK = 1e-2, 1e-3, 16
#: Tasks of a batch, rollouts of each, and optimizer steps on it.
BATCH, SIZE, STEPS = 12, 8, 4
#: Of the routers, in units of their logits and of their weights' standard deviation.
ROUNDING = (1e-4, 1e-3, 1e-2, 1e-1)
VOCABULARY = 1500


def noise(seed: int) -> list[Datum]:
    """Random tokens, to be made likelier or less likely at random."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(4):
        tokens = rng.integers(0, VOCABULARY, 33)
        signs = rng.choice([-1.0, 1.0], 32).astype(np.float32)
        inputs = {"target_tokens": tokens[1:].tolist(), "weights": signs}
        made.append(Datum(ModelInput.from_ints(tokens[:-1].tolist()), inputs))
    return made


class Drift:
    """One run of RL, and the copy of it that samples."""

    def __init__(self, service: weft.ServiceClient, loss: rl.losses.Loss, seed: int) -> None:
        self.loss, self.seed, self.draw = loss, seed, random.Random(seed)
        self.run, self.copy = (
            service.create_lora_training_client(BASE_MODEL, rank=RANK, seed=seed).result() for _ in range(2)
        )
        making = loss.made(self.run)
        self.handle = making.result() if making is not None else None
        self.renderer = TemplateRenderer(self.run.get_tokenizer())

    def sampler(self, step: int) -> weft.SamplingClient:
        self.copy.load_state(self.run.save_state(f"step-{step}").result().path)
        self.copy.forward_backward(noise(self.seed), "cross_entropy")
        self.copy.optim_step(AdamParams(learning_rate=NOISE))
        return self.copy.save_weights_and_get_sampling_client().result()

    def group(self, sampler: weft.SamplingClient, seed: int) -> Callable[[], list[rl.Rollout]]:
        """Rollouts of one task, under way."""
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

    def batch(self, number: int) -> tuple[float, float]:
        """Sample one, and take its steps: mean reward, and the mismatch KL of the last step."""
        sampler = self.sampler(number)
        under_way = [self.group(sampler, (self.seed * 1000 + number) * BATCH + each) for each in range(BATCH)]
        groups = [ended() for ended in under_way]
        data = self.data(groups)
        for _ in range(STEPS):
            backward = self.loss.forward_backward(self.run, data, self.handle)
            self.run.optim_step(AdamParams(learning_rate=RATE))
        found = backward.result().metrics
        if self.handle is None:
            kl = found["mismatch_kl:mean"]
        else:  # a traced loss sums it, times the weight of a position
            kl = found["custom/mismatch_kl:sum"] / found["custom/tokens:sum"]
        return fmean(rollout.reward for group in groups for rollout in group), kl

    def data(self, groups: Sequence[Sequence[rl.Rollout]]) -> list[Datum]:
        """Of all rollouts, with the trainer's logprobs of now where the loss reads them."""
        drawn = sum(rollout.sampled for group in groups for rollout in group)
        data = []
        for group in groups:
            for rollout, advantage in zip(group, rl.dr_grpo([each.reward for each in group]), strict=True):
                data += rl.data_of(rollout, advantage)
        if "old" not in self.loss.reads:
            return [self.loss.datum(datum, 1 / drawn) for datum in data]
        asked = [
            Datum(datum.model_input, {"target_tokens": given["target_tokens"], "weights": given["mask"]})
            for datum in data
            if (given := datum.loss_fn_inputs)
        ]
        read = self.run.forward(asked, "cross_entropy").result().loss_fn_outputs
        return [
            self.loss.datum(datum, 1 / drawn, old=output["logprobs"].to_numpy())
            for datum, output in zip(data, read, strict=True)
        ]


def drift(service: weft.ServiceClient, seeds: int, batches: int) -> dict[str, dict[str, list[list[float]]]]:
    """Rewards and mismatch KL of each loss, by seed and batch."""
    found = {}
    for name, loss in LOSSES.items():
        runs = []
        for seed in range(seeds):
            one = Drift(service, loss, seed)
            runs.append([one.batch(number) for number in range(batches)])
            print(name, seed, [round(reward, 2) for reward, _ in runs[-1]], file=sys.stderr, flush=True)
        found[name] = {
            "reward": [[reward for reward, _ in run] for run in runs],
            "mismatch_kl": [[kl for _, kl in run] for run in runs],
        }
    return found


def routers(decoder: Decoder) -> list[Router]:
    return [module for module in decoder.modules() if isinstance(module, Router)]


def rounded(decoder: Decoder, size: float) -> None:
    """Each router chooses by its logits and noise; what the chosen count is the router's own."""
    generator = torch.Generator().manual_seed(0)

    def choose(router: Router, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x_TD, lora, _ = given
        logits_TE = x_TD @ router.weight.T
        noisy_TE = logits_TE + size * torch.randn(logits_TE.shape, generator=generator)
        return x_TD, lora, torch.topk(noisy_TE, router.choices, dim=-1).indices

    for router in routers(decoder):
        router.register_forward_pre_hook(choose)


def reweighted(decoder: Decoder, size: float) -> None:
    """The weights of each router are off by `size` of their standard deviation."""
    generator = torch.Generator().manual_seed(0)
    for router in routers(decoder):
        weight = router.weight
        weight += size * weight.std() * torch.randn(weight.shape, generator=generator)


KINDS: dict[str, Callable[[Decoder, float], None]] = {"rounding": rounded, "weights": reweighted}


def routing(prompts: int, tokens: int) -> dict[str, list[dict[str, float]]]:
    """Mismatch KL by the size of the noise, without and with replay."""
    trainer, found = load_decoder(TINY_PATH), dict[str, list[dict[str, float]]]()
    for kind, disturb in KINDS.items():
        found[kind] = []
        for size in ROUNDING:
            sampler = load_decoder(TINY_PATH)
            disturb(sampler, size)
            engine = TorchEngine(sampler, (), slots=32, context=256, prefix_bytes=0)
            point = {"noise": size} | mismatches(engine, trainer, prompts, tokens)
            found[kind].append(point)
    return found


def mismatches(engine: TorchEngine, trainer: Decoder, prompts: int, tokens: int) -> dict[str, float]:
    rng, ratios = np.random.default_rng(1), dict[str, list[np.ndarray]]({"free": [], "replayed": []})
    asked = {f"r{each}": tuple(rng.integers(0, VOCABULARY, 24).tolist()) for each in range(prompts)}
    for number, (name, prompt) in enumerate(asked.items()):
        params = EngineParams(max_tokens=tokens, seed=number, stop_at_eos=False)
        engine.add(GenerateRequest(name, prompt, params, return_routed_experts=True))
    ended: list[Any] = []
    while len(ended) < prompts:
        ended += engine.step()
    for finished in ended:
        [sequence] = finished.sequences
        routes = torch.from_numpy(sequence.routed_experts).transpose(0, 1).contiguous()
        for name, forced in (("free", None), ("replayed", routes)):
            own = scored(trainer, [*asked[finished.id], *sequence.tokens.tolist()], len(sequence.tokens), forced)
            ratios[name].append(own.astype(np.float64) - sequence.logprobs)
    return {name: mismatch_kl(np.concatenate(each)) for name, each in ratios.items()}


@torch.no_grad()
def scored(decoder: Decoder, ids: Sequence[int], count: int, routes: Tensor | None) -> np.ndarray:
    """The trainer's logprobs of the last `count` of `ids`."""
    length = len(ids) - 1
    hidden = decoder(torch.tensor(ids[:-1]), torch.arange(length), PackedAttend([length]), None, None, routes)
    rows = torch.arange(length - count, length)
    logprobs: np.ndarray = target_logprobs(decoder, hidden, rows, torch.tensor(ids[-count:]), None).numpy()
    return logprobs


def mismatch_kl(log_ratio: np.ndarray) -> float:
    """Mean of rho - 1 - log rho."""
    return float((np.exp(log_ratio) - 1 - log_ratio).mean())


def claims(drifted: dict[str, Any], routed: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    quarter, found = max(1, steps // 4), []

    def mean(loss: str, what: str, first: bool) -> float:
        runs = drifted[loss][what]
        return fmean(value for run in runs for value in (run[:quarter] if first else run[-quarter:]))

    for loss, drifts in (("importance_sampling", True), ("icepop", False)):
        grown = mean(loss, "mismatch_kl", False) / mean(loss, "mismatch_kl", True)
        goal = "grows past" if drifts else "stays below"
        name = f"mismatch KL of {loss}, last quarter / first, {goal}"
        found.append(claim(name, grown, 2.0, grown > 2.0 if drifts else grown <= 2.0))
    apart = mean("importance_sampling", "mismatch_kl", False) / mean("icepop", "mismatch_kl", False)
    found.append(claim("mismatch KL of importance_sampling / icepop, last quarter", apart, 2.0, apart >= 2.0))
    ahead = mean("icepop", "reward", False) - mean("importance_sampling", "reward", False)
    found.append(claim("final reward of icepop less that of importance_sampling", ahead, 0.0, ahead >= 0))
    worst = routed["rounding"][-1]
    found.append(claim("mismatch KL of the largest rounding", worst["free"], 1e-4, worst["free"] > 1e-4))
    highest = max(point["replayed"] for point in routed["rounding"])
    return [*found, claim("the same with routing replay, at most", highest, 1e-10, highest <= 1e-10)]


def plot(result: dict[str, Any], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2))
    for ax, what in ((left, "mismatch_kl"), (middle, "reward")):
        for (loss, runs), colour in zip(result["drift"].items(), ("C3", "C0"), strict=True):
            for run in runs[what]:
                ax.plot(run, colour, alpha=0.25, linewidth=0.8)
            ax.plot([fmean(step) for step in zip(*runs[what], strict=True)], colour, label=loss)
        ax.set(xlabel=f"batch, of {result['steps']} optimizer steps", ylabel=what.replace("_kl", " KL"))
        ax.grid(alpha=0.3)
    left.set_yscale("log")
    middle.legend()
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--plot", type=Path, help="draw it here")
    parser.add_argument("--quick", action="store_true", help="one seed, two batches")
    args = parser.parse_args()
    seeds, batches, prompts = (1, 2, 4) if args.quick else (3, 14, 16)
    with (
        serve() as (url, data_dir),
        weft.ServiceClient(base_url=url, api_key=make_key(data_dir, "bench")) as service,
    ):
        drifted = drift(service, seeds, batches)
    routed = routing(prompts, 16)
    result = {
        "bench": "mismatch",
        "compares": "losses under noise in the sampler's weights; routing replay under noise in the sampler's routers",
        "machine": machine(),
        "batches": batches,
        "steps": STEPS,
        "seeds": seeds,
        "noise": NOISE,
        "drift": drifted,
        "routing": routed,
        "claims": claims(drifted, routed, batches),
    }
    if args.plot:
        plot(result, args.plot)
    print(json.dumps(result) if args.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
