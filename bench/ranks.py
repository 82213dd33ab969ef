"""What a second rank brings a trainer: tokens per second of two ranks over those of one, on bench/trainer.py's model.

    python bench/ranks.py [--json] [--out FILE] [--ranks 2] [--rounds 15] [--tokens 4096]
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

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from weft.wire.binary.codec import ArrayDatum, TrainBatch, encode_train_request

from bench.parts.results import claim, keep, machine
from bench.parts.serving import as_workers_run
from bench.parts.toy import CONFIG, save_toy
from bench.trainer import SEQUENCE
from scheduler.links.configs import Basics, TrainerBounds, TrainerConfig
from scheduler.links.messages import Done, FromTrainer, OpKind, Pass, PassOver, PullPass, RunSpec, TrainOp
from store.blobs.folder import FolderBlobs

TENANTS, ADAPTER_RANK = 8, 8
TARGET = 1.8
#: Where workers share a base (the default of `base_dir`).
SHARED = "/dev/shm"
#: As sparse as Qwen3-30B-A3B: of 128 experts each token has 8.
SPARSE = replace(CONFIG, num_experts=128, experts_per_token=8)


class Trainer:
    """A trainer's process, and the server's end of its link."""

    def __init__(self, folder: Path, model: Path, ranks: int, shard: str = "all", base_dir: str = "") -> None:
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers", "trainer", "--link-fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        theirs.close()
        self.blobs = FolderBlobs(folder / "blobs")
        bounds = TrainerBounds(snapshot_every_tokens=1 << 40)
        basics = Basics(str(folder), {"toy": str(model)}, device="cpu", base_dir=base_dir)
        self._send(TrainerConfig(basics, bounds, ranks=ranks, shard=shard))
        self._until(PullPass)
        self.work([TrainOp(f"c{n}", f"run{n}", 0, OpKind.CREATE, spec=spec(f"run{n}")) for n in range(TENANTS)])

    def work(self, ops: list[TrainOp]) -> float:
        """The seconds that the trainer took for a pass."""
        self._send(Pass(1, "toy", ops))
        over: PassOver = self._until(PassOver)
        self._until(PullPass)
        return over.seconds

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _send(self, message: msgspec.Struct) -> None:
        payload = msgspec.msgpack.encode(message)
        self._socket.sendall(struct.pack("<I", len(payload)) + payload)

    def _until(self, kind: type[Any]) -> Any:
        while True:
            (size,) = struct.unpack("<I", self._socket.recv(4, socket.MSG_WAITALL))
            message = msgspec.msgpack.decode(self._socket.recv(size, socket.MSG_WAITALL), type=FromTrainer)
            if isinstance(message, Done) and message.failure is not None:
                raise RuntimeError(message.failure.message)
            if isinstance(message, kind):
                return message


def spec(name: str) -> RunSpec:
    return RunSpec(name, "toy", ADAPTER_RANK, 16.0, 1, train_attn=True, train_mlp=True, train_unembed=True)


def body(tenant: int, tokens: int) -> bytes:
    rng = np.random.default_rng(tenant)
    data = [
        ArrayDatum(
            rng.integers(0, CONFIG.vocab_size, length).astype(np.int32),
            {"target_tokens": rng.integers(0, CONFIG.vocab_size, length), "weights": np.ones(length, np.float32)},
        )
        for length in [SEQUENCE] * (tokens // SEQUENCE) + [tokens % SEQUENCE] * (tokens % SEQUENCE > 0)
    ]
    return encode_train_request(TrainBatch(f"run{tenant}", 1, "cross_entropy", data=data))


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
        "claims": [claim(f"{what}, {name}", value, TARGET, value >= TARGET) for name, value in speedups.items()],
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
        found["claims"].append(claim(name, ratio, 1.0, ratio >= 1.0))
    return found


def timed(trainers: dict[str, Trainer], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each trainer's passes, taken in turns; the trainers are closed."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(-1, rounds):  # the first warms up
        for name, trainer in trainers.items():
            ops = []
            for tenant in range(TENANTS):
                ref = f"body{tenant}"
                if not trainer.blobs.exists(ref):
                    trainer.blobs.put(ref, body(tenant, tokens // TENANTS))
                op_id, seq = f"f{number}-{tenant}", number + 2
                ops.append(TrainOp(op_id, f"run{tenant}", seq, OpKind.FORWARD_BACKWARD, ref))
            took = trainer.work(ops)
            if number >= 0:
                seconds[name].append(took)
    for trainer in trainers.values():
        trainer.close()
    return seconds


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Two ranks of a trainer against one.")
    parser.add_argument("--json", action="store_true", help="print the whole result")
    parser.add_argument("--out", type=Path, help="write the result there too")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--tokens", type=int, action="append", help="of a pass, over all tenants (with --layouts: repeat)"
    )
    parser.add_argument("--layouts", action="store_true", help="compare trainer.shard = all and experts")
    args = parser.parse_args(argv)
    if args.layouts:
        return show_layouts(args)
    tokens = (args.tokens or [4096])[0]
    result = {"machine": machine(), **compare(args.ranks, tokens, args.rounds)}
    keep(result, args)
    if args.json:
        print(json.dumps(result))
        return 0
    print(result["tokens_per_s"])
    for claimed in result["claims"]:
        print(f"{claimed['name']}: {claimed['value']:.2f}")
    return 0


def show_layouts(args: argparse.Namespace) -> int:
    result = {"machine": machine(), **layouts(args.ranks, args.tokens or [512, 4096], args.rounds)}
    keep(result, args)
    if args.json:
        print(json.dumps(result))
        return 0
    for each, claimed in zip(result["passes"], result["claims"], strict=True):
        print(f"{claimed['name']}: {claimed['value']:.2f} ({each['tokens_per_s']})")
    return 0


if __name__ == "__main__":
    as_workers_run()
    sys.exit(main(sys.argv[1:]))
