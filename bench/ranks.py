"""What a second rank brings a trainer: tokens per second of two ranks over those of one, on bench/trainer.py's model.

    python bench/ranks.py [--json] [--out FILE] [--ranks 2] [--rounds 50] [--tokens 4096]
    python bench/ranks.py --layouts [--tokens 512 --tokens 4096]

Both trainers are worker processes as the server starts them, with one thread for each rank, and take the same passes in
turn: a forward_backward of each of eight tenants, 512 tokens each by default. The time is the trainer's own for the
pass, decoding and answers included; the minimum of the rounds counts. There are two trainers of two ranks: on a CPU
the ranks of a host map one copy of the base, as all its workers do; where they cannot, each has a part, and layers are
gathered over gloo.

`--layouts` compares what ranks may have of a base that is not mapped (`trainer.shard`): a part of everything, gathered
layer by layer, or a share of the experts, to which tokens travel. Its model has four layers of 128 experts, 8 for each
token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.parts.passes import cut, random_batch
from bench.parts.results import asked, at_least, machine, tell
from bench.parts.serving import as_workers_run
from bench.parts.toy import CONFIG, save_toy
from bench.parts.worker import Worker
from bench.trainer import SEQUENCE
from scheduler.links.configs import Basics, TrainerBounds, TrainerConfig
from scheduler.links.messages import OpKind, Pass, PassOver, PullPass, RunSpec, TrainOp
from store.blobs.folder import FolderBlobs

TENANTS, ADAPTER_RANK = 8, 8
TARGET = 1.8
#: The folder in which workers share a base (the default of `base_dir`).
SHARED = "/dev/shm"
#: As sparse as Qwen3-30B-A3B: each token has 8 of 128 experts.
SPARSE = replace(CONFIG, num_experts=128, experts_per_token=8)


class Trainer:
    """A trainer process with a run for each tenant."""

    def __init__(self, folder: Path, model: Path, ranks: int, shard: str = "all", base_dir: str = "") -> None:
        self.blobs = FolderBlobs(folder / "blobs")
        bounds = TrainerBounds(snapshot_every_tokens=1 << 40)
        basics = Basics(str(folder), {"toy": str(model)}, device="cpu", base_dir=base_dir)
        self._worker = Worker("trainer", TrainerConfig(basics, bounds, ranks=ranks, shard=shard))
        self.work([TrainOp(f"c{n}", f"run{n}", 0, OpKind.CREATE, spec=spec(f"run{n}")) for n in range(TENANTS)])

    def work(self, ops: list[TrainOp]) -> float:
        """Execute a pass; returns its seconds on the trainer."""
        self._worker.send(Pass(1, "toy", ops))
        over = self._worker.until(PassOver)
        self._worker.until(PullPass)
        return over.seconds

    def close(self) -> None:
        self._worker.end()


def spec(name: str) -> RunSpec:
    return RunSpec(name, "toy", ADAPTER_RANK, 16.0, 1, train_attn=True, train_mlp=True, train_unembed=True)


def compare(ranks: int, tokens: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as place:
        model = save_toy(Path(place) / "toy")
        kinds = {"one rank": (1, SHARED), "one mapping": (ranks, SHARED), "parts over gloo": (ranks, "")}
        trainers = {
            name: Trainer(Path(place) / name.replace(" ", "-"), model, count, base_dir=base_dir)
            for name, (count, base_dir) in kinds.items()
        }
        seconds = timed(trainers, tokens, rounds)
    best = {name: min(found) for name, found in seconds.items()}
    speedups = {name: round(best["one rank"] / found, 3) for name, found in best.items() if name != "one rank"}
    what = f"{ranks} ranks / one rank, tokens/s at {tokens}-token passes"
    return {
        "ranks": ranks,
        "pass_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": {name: round(tokens / found) for name, found in best.items()},
        "claims": [at_least(f"{what}, {name}", value, TARGET) for name, value in speedups.items()],
    }


def layouts(ranks: int, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Tokens per second of each layout, and of one rank, at each size of a pass."""
    found: dict[str, Any] = {"ranks": ranks, "passes": [], "claims": []}
    for tokens in sizes:
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as place:
            model = save_toy(Path(place) / "toy", SPARSE)
            kinds = {"one rank": (1, "all"), "all": (ranks, "all"), "experts": (ranks, "experts")}
            trainers = {
                name: Trainer(Path(place) / name.replace(" ", "-"), model, *kind) for name, kind in kinds.items()
            }
            seconds = timed(trainers, tokens, rounds)
        per_s = {name: round(tokens / min(each)) for name, each in seconds.items()}
        found["passes"].append({"pass_tokens": tokens, "seconds": seconds, "tokens_per_s": per_s})
        ratio, name = per_s["experts"] / per_s["all"], f'shard = "experts" / "all", tokens/s at {tokens}-token passes'
        found["claims"].append(at_least(name, ratio, 1.0))
    return found


def timed(trainers: dict[str, Trainer], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each trainer's passes, taken in turn; closes the trainers."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(-1, rounds):  # the first warms up
        for name, trainer in trainers.items():
            ops = []
            for tenant in range(TENANTS):
                ref = f"body{tenant}"
                if not trainer.blobs.exists(ref):
                    lengths = cut(tokens // TENANTS, SEQUENCE)
                    trainer.blobs.put(ref, random_batch(CONFIG.vocab_size, lengths, seed=tenant))
                op_id, seq = f"f{number}-{tenant}", number + 2
                ops.append(TrainOp(op_id, f"run{tenant}", seq, OpKind.FORWARD_BACKWARD, ref))
            took = trainer.work(ops)
            if number >= 0:
                seconds[name].append(took)
    for trainer in trainers.values():
        trainer.close()
    return seconds


def main() -> None:
    parser = asked(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--tokens", type=int, action="append", help="of a pass, over all tenants (with --layouts: repeat)"
    )
    parser.add_argument("--layouts", action="store_true", help="compare trainer.shard = all and experts")
    args = parser.parse_args()
    if args.layouts:
        found = layouts(args.ranks, args.tokens or [512, 4096], args.rounds)
    else:
        found = compare(args.ranks, (args.tokens or [4096])[0], args.rounds)
    tell({"machine": machine(), **found}, args)


if __name__ == "__main__":
    as_workers_run()
    main()
