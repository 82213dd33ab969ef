"""The example of README.md on one GPU: Qwen3-30B-A3B's shape, trained and sampled from by one `weftd` with one copy of
the base on the device.

    python bench/gpu_served.py [--folder /dev/shm/model] [--tenants 4] [--rank 32] [--layers 48] [--out FILE] [--keep]
    python bench/gpu_served.py --shape tiny          the same on any machine, in a minute: what runs, not how fast

Random weights in a folder like a published one's (parts/published.py), a `weftd serve` with default settings, and
unmodified `tinker` clients, a tenant each. In this order, each part printed and written when it is known:

- start: seconds until the server answers, and what it then has of the device beside `weftd plan`.
- training: `--steps` steps of every tenant on its own batch, all at once; the losses.
- agreement: all save and sample at once; log-probabilities of the sampled tokens, the sampler's beside the trainer's.
- rates: tokens per second of training alone, sampling alone, and both at once, all tenants in each.
- killed: the trainer's process, by SIGKILL; until each tenant has its next result, and how far that is off.

The bound of the agreement: sampler and trainer round differently. A number of bfloat16 has 8 bits, so each of the two
additions of a layer to the residual stream is off by up to 2**-9 of it; over 2 x 48 of them, at random, by 2 % of a
logit of size one. A median of 0.05 is allowed, and single tokens 1.0, for a tie between two experts may fall either
way. In float32, on a CPU, 1e-4 and 1e-3.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from api.server.workers.memory_plan import devices_here, plan_on
from bench.gpu import SHAPES
from bench.parts.gpu_measure import Device
from bench.parts.published import GIB, model_folder, say, size_of
from bench.parts.results import at_most, claim, machine
from bench.parts.serving import BIN, make_keys, serve, trainers_of
from store.load_settings import load_settings
from workers.leave import leave
from workers.model.adapters.shape import AdapterShape
from workers.model.base.files import remove_unused
from workers.model.card import config_card
from workers.model.config import DecoderConfig
from workers.model.planning.plan import Plan

import tinker  # isort: skip  (after serving, which sets its environment)
from tinker import types  # isort: skip
from bench.parts.data import datum  # isort: skip

MODEL = "published/shape"
#: How long anything may take, in seconds.
PATIENCE_S = 300.0
#: Bounds of the difference between log-probabilities of sampler and trainer, by device: its median, and a single one.
BOUNDS = {"cuda": (0.05, 1.0), "cpu": (1e-4, 1e-3)}
#: How far a loss may differ after a run is trained again from its start in other company: steps of Adam enlarge
#: rounding (docs/performance.md); on a CPU there is no difference.
TRAINED_AGAIN = {"cuda": 0.01, "cpu": 0.0}
#: Below this many times the base's size on the device, there is one copy and not two.
COPIES = 1.3

Floats = np.ndarray[Any, Any]


@dataclass
class Tenant:
    """A client with a run of its own, and the batch that it trains on."""

    run: Any
    batch: list[types.Datum]
    prompt: list[int]
    new: int
    samples: int
    losses: list[float] = field(default_factory=list)
    sampler: Any = None

    @classmethod
    def of(cls, url: str, key: str, number: int, args: argparse.Namespace, config: DecoderConfig) -> Tenant:
        length, drawn = min(args.length, config.context_length // 2), random.Random(number)
        texts = [[drawn.randrange(config.vocab_size) for _ in range(length + 1)] for _ in range(args.sequences)]
        service = tinker.ServiceClient(base_url=url, api_key=key)
        run = service.create_lora_training_client(MODEL, rank=args.rank, seed=number).result(PATIENCE_S)
        prompt = texts[0][: length // 4]
        new = min(args.new, config.context_length - len(prompt))
        return cls(run, [datum(text) for text in texts], prompt, new, args.samples)

    def step(self) -> int:
        """Make a step; returns the tokens trained."""
        backward = self.run.forward_backward(self.batch, "cross_entropy")
        update = self.run.optim_step(types.AdamParams(learning_rate=1e-3))
        tokens = sum(len(each.model_input.to_ints()) for each in self.batch)
        self.losses.append(backward.result(PATIENCE_S).metrics["loss:sum"] / tokens)
        update.result(PATIENCE_S)
        return tokens

    def save(self) -> None:
        self.sampler = self.run.save_weights_and_get_sampling_client().result(PATIENCE_S)

    def draw(self) -> list[Any]:
        sampling = types.SamplingParams(max_tokens=self.new, temperature=1.0)
        asked = self.sampler.sample(types.ModelInput.from_ints(self.prompt), self.samples, sampling)
        found: list[Any] = asked.result(PATIENCE_S).sequences
        return found

    def sample(self) -> int:
        """Sample; returns the tokens sampled."""
        return sum(len(each.tokens) for each in self.draw())

    def logprobs(self) -> Floats:
        """The trainer's logprobs of the batch."""
        return np.concatenate(self._logprobs(self.batch))

    def disagreement(self) -> Floats:
        """Sample now; returns, for each token, the difference between the sampler's and the trainer's logprob."""
        drawn = self.draw()
        trained = self._logprobs([datum([*self.prompt, *each.tokens]) for each in drawn])
        pairs = zip(drawn, trained, strict=True)
        return np.concatenate([np.abs(own[-len(each.tokens) :] - np.array(each.logprobs)) for each, own in pairs])

    def _logprobs(self, data: list[types.Datum]) -> list[Floats]:
        outputs = self.run.forward(data, "cross_entropy").result(PATIENCE_S).loss_fn_outputs
        return [each["logprobs"].to_numpy() for each in outputs]


def at_once(works: Sequence[Callable[[], Any]]) -> tuple[list[Any], list[float]]:
    """Call each in a thread of its own; returns their results, and the seconds until each was done."""
    began = time.monotonic()

    def timed(work: Callable[[], Any]) -> tuple[Any, float]:
        return work(), time.monotonic() - began

    pool = ThreadPoolExecutor(len(works))
    try:
        found = list(pool.map(timed, works))
    finally:
        pool.shutdown(wait=False)  # after an interrupt nobody waits for the others
    return [each for each, _ in found], [seconds for _, seconds in found]


def rates(works: dict[str, list[Callable[[], int]]], seconds: float) -> dict[str, float]:
    """Tokens per second of each kind of work, all kinds at once. Work that began in the time is finished and
    counted."""
    until = time.monotonic() + seconds

    def repeat(work: Callable[[], int]) -> int:
        tokens = work()
        while time.monotonic() < until:
            tokens += work()
        return tokens

    every = [partial(repeat, work) for kind in works.values() for work in kind]
    tokens, took = at_once(every)
    found, start = {}, 0
    for name, kind in works.items():
        found[name] = sum(tokens[start : start + len(kind)]) / max(took[start : start + len(kind)])
        start += len(kind)
    return found


def planned(folder: Path, args: argparse.Namespace, device: Device | None) -> Plan:
    """Print the output of `weftd plan`; returns the plan."""
    command = [str(BIN / "weftd"), "plan", "--model", str(folder), "--tenants", str(args.tenants)]
    command += ["--rank", str(args.rank), *(["--gpu-gib", f"{device.total_bytes / GIB:.1f}"] if device else [])]
    say(shlex.join(["weftd", *command[1:]]))
    say(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    settings, cards = load_settings(None, data_dir=Path()), {MODEL: config_card(MODEL, folder)}
    return plan_on(devices_here(settings)[0], settings, cards, tenants=args.tenants, rank=args.rank)


@dataclass
class Bench:
    """Measures a running server, and holds what is already measured."""

    args: argparse.Namespace
    config: DecoderConfig
    device: Device | None
    result: dict[str, Any]

    def known(self, part: str, found: dict[str, Any], *claims: dict[str, Any]) -> None:
        found["seconds_since_start"] = round(time.monotonic() - self.args.began, 1)
        if self.device:
            found["device_used_bytes"] = self.device.used_bytes()
            found["device_processes"] = self.device.processes()
        self.result[part] = found
        self.result["claims"] += claims
        say(f"{part}: {json.dumps(found)}")
        for each in claims:
            say(f"  {each['name']}: {each['value']:g}, goal {each['target']:g}, {'holds' if each['holds'] else 'NOT'}")
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(self.result, indent=1) + "\n")

    @property
    def kind(self) -> str:
        return "cuda" if self.device else "cpu"

    def start(self, ready_s: float, plan: Plan, before_bytes: int) -> None:
        parts = {part.name: part.size_bytes for part in plan.parts}
        found: dict[str, Any] = {"ready_s": round(ready_s, 1), "planned_bytes": parts}
        if not self.device:
            return self.known("start", found)
        there = ("processes and libraries", "prompts that are kept", "keys and values")
        beside = before_bytes + sum(parts.get(name, 0) for name in there)
        copies = (self.device.used_bytes() - beside) / size_of(self.config)
        found |= {"before_bytes": before_bytes, "copies": copies}
        return self.known("start", found, claim("copies of the base on the device", copies, COPIES, copies < COPIES))

    def training(self, tenants: Sequence[Tenant]) -> None:
        """Measure training. The first step of a process compiles kernels."""
        took = [max(at_once([tenant.step for tenant in tenants])[1]) for _ in range(self.args.steps)]
        losses = [[round(loss, 4) for loss in tenant.losses] for tenant in tenants]
        fallen = min(tenant.losses[0] - tenant.losses[-1] for tenant in tenants)
        found = {"step_s": [round(each, 2) for each in took], "losses": losses}
        self.known("training", found, claim("the loss fell at least by", fallen, 0.0, fallen > 0))

    def agreement(self, tenants: Sequence[Tenant]) -> None:
        saved = max(at_once([tenant.save for tenant in tenants])[1])
        first = max(at_once([tenant.sample for tenant in tenants])[1])
        say(f"all saved in {saved:.1f} s, and sampled a first time in {first:.1f} s")
        found = np.concatenate(at_once([tenant.disagreement for tenant in tenants])[0])
        median, most, (bound, worst) = float(np.median(found)), float(found.max()), BOUNDS[self.kind]
        self.known(
            "agreement",
            {"saved_s": round(saved, 2), "first_samples_s": round(first, 2), "differences": spread(found)},
            at_most("log-probabilities of sampler and trainer: median difference", median, bound),
            at_most("the largest", most, worst),
        )

    def rates(self, tenants: Sequence[Tenant]) -> None:
        train = [tenant.step for tenant in tenants]
        sample = [tenant.sample for tenant in tenants]
        found: dict[str, Any] = {}
        for name, works in (
            ("training alone", {"trained": train}),
            ("sampling alone", {"sampled": sample}),
            ("both at once", {"trained": train, "sampled": sample}),
        ):
            found[name] = {kind: round(rate, 1) for kind, rate in rates(works, self.args.seconds).items()}
            self.known("rates", found)

    def killed(self, tenants: Sequence[Tenant], server: psutil.Process, log: Path) -> None:
        before = [tenant.logprobs() for tenant in tenants]
        logged = log.stat().st_size
        trainers_of(server.pid)[0].kill()
        after, took = at_once([tenant.logprobs for tenant in tenants])
        off = np.abs(np.concatenate(after) - np.concatenate(before))
        loss = max(abs(float(own.mean() / was.mean()) - 1) for own, was in zip(after, before, strict=True))
        bound = TRAINED_AGAIN[self.kind]
        with log.open() as lines:
            lines.seek(logged)
            came = [line.strip() for line in lines if "[trainer]" in line and f"{MODEL}: " in line]
        loaded = sum(": loaded," in line for line in came)
        found = {"first_result_s": round(min(took), 2), "all_results_s": round(max(took), 2)}
        self.known(
            "killed",
            found | {"log": came, "differences": spread(off)},
            claim("the base was loaded again, times", loaded, 0, loaded == 0 and bool(came)),
            at_most("a tenant's loss after the kill differs by the share", loss, bound),
        )


def spread(found: Floats) -> dict[str, float]:
    return {"tokens": len(found)} | {f"p{at}": float(np.percentile(found, at)) for at in (50, 90, 99, 100)}


def run(args: argparse.Namespace) -> int:
    config, device = SHAPES[args.shape], Device.here()
    config = replace(config, num_layers=args.layers or config.num_layers)
    result: dict[str, Any] = {
        "bench": "gpu_served",
        "machine": machine() | ({"gpu": device.name, "cuda": torch.version.cuda} if device else {}),
        "shape": args.shape,
        "layers": config.num_layers,
        **{name: getattr(args, name) for name in ("tenants", "rank", "sequences", "length", "samples", "new")},
        "claims": [],
    }
    bench = Bench(args, config, device, result)
    saved_bytes = args.tenants * 4 * AdapterShape(config, args.rank).numel
    with model_folder(args.folder, config, saved_bytes, keep=args.keep) as folder:
        plan = planned(folder, args, device)
        before, args.began = device.used_bytes() if device else 0, time.monotonic()
        with serve("--model", f"{MODEL}={folder}", shown=True) as (url, data_dir):
            try:
                bench.start(time.monotonic() - args.began, plan, before)
                server = next(each for each in psutil.Process().children() if str(data_dir) in each.cmdline())
                keys = make_keys(data_dir, [f"tenant-{number}" for number in range(args.tenants)])
                makes = [partial(Tenant.of, url, key, number, args, config) for number, key in enumerate(keys)]
                tenants, took = at_once(makes)
                say(f"{args.tenants} runs of rank {args.rank} are there after {max(took):.1f} s")
                bench.training(tenants)
                bench.agreement(tenants)
                bench.rates(tenants)
                bench.killed(tenants, server, data_dir / "stderr.log")
            finally:
                end_at_once(data_dir)
    say(f"wrote {args.out}")
    return 0 if all(each["holds"] for each in result["claims"]) else 1


def end_at_once(data_dir: Path) -> None:
    """End at once: nothing is needed any more, so nothing is stored; workers end with their server."""
    for child in psutil.Process().children():
        if str(data_dir) in child.cmdline():
            family = child.children(recursive=True)
            child.kill()
            psutil.wait_procs(family, timeout=10)
    remove_unused(Path("/dev/shm"), within_s=20)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One weftd on one GPU, training and sampling with one base.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has; 0: all")
    parser.add_argument("--folder", type=Path, help="the model's; one with a config.json is used as it is")
    parser.add_argument("--keep", action="store_true", help="the model's folder")
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=4, help="of a batch")
    parser.add_argument("--length", type=int, default=512, help="of each; half of the context at most")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of each sample")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each rate")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_served.json")
    return parser.parse_args(argv)


def _ended(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    arguments = _arguments(None)
    signal.signal(signal.SIGTERM, _ended)
    try:
        code = run(arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code)  # clients may still wait for a server that is no more
