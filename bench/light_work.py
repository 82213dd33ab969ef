"""What steps, saves, loads and creates cost a trainer, in tokens: the source of the constants in
`scheduler/order/light_work.py`, on the built-in model, on the CPU, without a server.

    python bench/light_work.py [--json] [--out FILE] [--rounds 5]

One thread, processor time of the process (the kernel's part of writing files included, waiting for the disk not), the
least of the rounds. A kind of work is timed at several ranks and fitted to

    tokens = fixed + slope x parameters / base + turn x parameters x rank / base

with `parameters` those of the adapter, `base` the parameters of the base model that a token is multiplied with, and a
token's time that of a forward_backward of 1,024 tokens at rank 8. The last term is the optimizer that multiplies
matrices, dimuon's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from weft.wire import OptimStepRequest

from bench.parts.passes import STEP, execute, random_batch
from bench.parts.results import asked, machine, tell
from bench.parts.serving import BASE_MODEL, as_workers_run
from scheduler.links.configs import TrainerBounds
from scheduler.links.messages import OpKind, Pass, RunSpec, TrainOp
from store.blobs.folder import FolderBlobs
from workers.model.adapters.shape import AdapterShape
from workers.model.base.weights import load_decoder
from workers.model.tiny import TINY_PATH
from workers.trainer.trainer import Trainer

RANKS = (8, 32, 64, 128)
SLICE_TOKENS = 1024


class Runs:
    def __init__(self, folder: Path) -> None:
        self.decoder = load_decoder(TINY_PATH)
        self.blobs = FolderBlobs(folder / "blobs")
        self.trainer = Trainer({BASE_MODEL: self.decoder}, self.blobs, TrainerBounds(snapshot_every_tokens=1 << 40))
        self._count = 0
        muon = OptimStepRequest(model_id="any", optimizer_params={"type": "dimuon", "learning_rate": 1e-4})
        self.blobs.put("adamw", STEP)
        self.blobs.put("dimuon", muon.model_dump_json(exclude_none=True).encode())
        self.blobs.put("export", b'{"model_id": "any", "path": "x", "seq_id": 1}')
        self.blobs.put("batch", random_batch(self.decoder.config.vocab_size, [SLICE_TOKENS // 8] * 8, seed=0))

    def spec(self, rank: int, optimizer: str) -> RunSpec:
        return RunSpec(f"{optimizer}-{rank}", BASE_MODEL, rank, 32.0, 0, True, True, True, optimizer)

    def parameters(self, rank: int) -> int:
        return AdapterShape(self.decoder.config, rank).num_parameters

    def takes_s(self, kind: OpKind, run: RunSpec, **fields: Any) -> float:
        """Processor time of a pass with this operation alone."""
        self._count += 1
        op = TrainOp(f"op{self._count}", run.run_id, self._count, kind, **fields)
        began = time.process_time()
        execute(self.trainer, Pass(self._count, BASE_MODEL, [op]))
        return time.process_time() - began

    def train(self, spec: RunSpec) -> float:
        return self.takes_s(OpKind.FORWARD_BACKWARD, spec, body_ref="batch", stop=8)


def works(runs: Runs) -> dict[str, Callable[[RunSpec], float]]:
    """Every kind of work without tokens, for an existing run."""
    target = {"target_ref": "weights/x"}
    return {
        "step": lambda spec: (runs.train(spec), runs.takes_s(OpKind.OPTIM_STEP, spec, body_ref=spec.optimizer))[1],
        "save_sampler": lambda spec: runs.takes_s(OpKind.SAVE_SAMPLER, spec, **target),
        "save_external": lambda spec: runs.takes_s(OpKind.SAVE_EXTERNAL, spec, body_ref="export", **target),
        "save_state": lambda spec: runs.takes_s(OpKind.SAVE_STATE, spec, **target),
        "load_state": lambda spec: runs.takes_s(OpKind.LOAD_STATE, spec, source_ref="weights/x", with_optimizer=True),
        "create": lambda spec: runs.takes_s(OpKind.CREATE, spec, spec=spec),
        "create_from": lambda spec: runs.takes_s(
            OpKind.CREATE, spec, spec=spec, source_ref="weights/x", with_optimizer=True
        ),
    }


def measure(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        base = runs.decoder.config.active_parameters
        least: dict[tuple[str, int], float] = {}
        tokens_s = float("inf")
        for _ in range(rounds):
            for optimizer in ("adamw", "dimuon"):
                for rank in RANKS:
                    spec = runs.spec(rank, optimizer)
                    runs.takes_s(OpKind.CREATE, spec, spec=spec)
                    if (optimizer, rank) == ("adamw", 8):
                        tokens_s = min(tokens_s, min(runs.train(spec) for _ in range(3)) / SLICE_TOKENS)
                    for name, work in works(runs).items():
                        if optimizer == "dimuon" and name != "step":
                            continue
                        at = (f"{optimizer} {name}" if name == "step" else name, rank)
                        least[at] = min(least.get(at, float("inf")), work(spec))
        parameters = {rank: runs.parameters(rank) for rank in RANKS}
    return {"machine": machine(), "base_parameters": base, "token_us": tokens_s * 1e6, "adapter_parameters": parameters,
            "milliseconds": {f"{name} rank {rank}": round(s * 1e3, 3) for (name, rank), s in least.items()},
            "tokens": fit(least, parameters, base, tokens_s)}  # fmt: skip


def fit(
    least: dict[tuple[str, int], float], parameters: dict[int, int], base: int, tokens_s: float
) -> dict[str, dict[str, float]]:
    """The costs of each kind, none below 0, by least squares of the relative error."""
    found = {}
    for name in dict.fromkeys(name for name, _ in least):
        rows = [
            (1.0, parameters[rank] / base, parameters[rank] * rank / base if name.startswith("dimuon") else 0.0)
            for rank in RANKS
        ]
        took = np.array([least[name, rank] / tokens_s for rank in RANKS])
        terms = np.array(rows) / took[:, None]
        keep = [True, True, name.startswith("dimuon")]
        while True:
            solution = np.zeros(3)
            solution[keep] = np.linalg.lstsq(terms[:, keep], np.ones(len(RANKS)), rcond=None)[0]
            if (solution >= 0).all():
                break
            keep[int(solution.argmin())] = False
        found[name] = {k: round(float(v), 3) for k, v in zip(("fixed", "slope", "turn"), solution, strict=True)}
    return found


def main() -> None:
    parser = asked(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found = measure(args.rounds)
    tell(found, args)


if __name__ == "__main__":
    as_workers_run()
    main()
