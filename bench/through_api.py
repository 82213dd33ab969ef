"""What the service costs the trainer: training through the API against the same trainer called directly.

    python bench/through_api.py [--json] [--quick]

Sixteen tenants, each with an unmodified `tinker` client in this process, keep two steps of 4 x 64 tokens in flight; the
server's trainer has one thread and the other core is for the rest (HTTP, journal, settlement, clients). Directly means
the same operations as passes of all sixteen, in this process, with one thread and the server idle. The two take
turns; each figure is the best of its rounds.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch, encode_train_request

from bench.parts.data import batch
from bench.parts.passes import STEP, execute
from bench.parts.results import asked, at_least, machine, tell
from bench.parts.serving import BASE_MODEL, as_workers_run, make_key, serve
from bench.path import ADAM
from scheduler.links.messages import OpKind, Pass, RunSpec, TrainOp
from store.blobs.folder import FolderBlobs
from workers.model.base.weights import load_decoder
from workers.model.tiny import TINY_PATH
from workers.trainer.trainer import Trainer

TENANTS, SEQUENCES, LENGTH, RANK = 16, 4, 64, 8
TOKENS = TENANTS * SEQUENCES * LENGTH


class Direct:
    """Sixteen runs on a trainer in this process."""

    def __init__(self, folder: Path) -> None:
        self._blobs = FolderBlobs(folder)
        self._trainer = Trainer({BASE_MODEL: load_decoder(TINY_PATH)}, self._blobs)
        self._runs = [f"run{i}" for i in range(TENANTS)]
        self._blobs.put("step", STEP)
        for i, run in enumerate(self._runs):
            data = [_array_datum(datum) for datum in batch(SEQUENCES, LENGTH, seed=i)]
            self._blobs.put(f"body-{run}", encode_train_request(TrainBatch(run, 1, "cross_entropy", data=data)))
            spec = RunSpec(run, BASE_MODEL, RANK, 32.0, i, train_attn=True, train_mlp=True, train_unembed=True)
            self._execute([TrainOp(f"create-{run}", run, 0, OpKind.CREATE, spec=spec)])

    def steps(self, count: int) -> float:
        """Tokens per second over `count` steps of all runs."""
        start = time.perf_counter()
        for _ in range(count):
            ops = [TrainOp(f"f-{r}", r, 1, OpKind.FORWARD_BACKWARD, f"body-{r}", stop=SEQUENCES) for r in self._runs]
            self._execute([*ops, *(TrainOp(f"s-{run}", run, 2, OpKind.OPTIM_STEP, "step") for run in self._runs)])
        return count * TOKENS / (time.perf_counter() - start)

    def _execute(self, ops: list[TrainOp]) -> None:
        execute(self._trainer, Pass(0, BASE_MODEL, ops))


def _array_datum(datum: Any) -> ArrayDatum:
    tokens = np.array(datum.model_input.to_ints(), np.int32)
    inputs = {name: np.array(tensor.data) for name, tensor in datum.loss_fn_inputs.items()}
    inputs["weights"] = inputs["weights"].astype(np.float32)
    return ArrayDatum(tokens, inputs)


def through(runs: list[Any], count: int) -> float:
    """Tokens per second over `count` steps of every client."""

    def train(number: int) -> None:
        data, open_steps = batch(SEQUENCES, LENGTH, seed=number), deque[Any]()
        for _ in range(count):
            if len(open_steps) == 2:
                for future in open_steps.popleft():
                    future.result()
            open_steps.append((runs[number].forward_backward(data, "cross_entropy"), runs[number].optim_step(ADAM)))
        for step in open_steps:
            for future in step:
                future.result()

    start = time.perf_counter()
    with ThreadPoolExecutor(TENANTS) as pool:
        list(pool.map(train, range(TENANTS)))
    return count * TOKENS / (time.perf_counter() - start)


def main() -> None:
    args = asked(__doc__, quick="fewer repetitions").parse_args()
    rounds, count = (2, 4) if args.quick else (5, 10)
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"direct": [], "through_api": []}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, serve() as (url, data_dir):
        direct = Direct(Path(folder))
        clients = [
            tinker.ServiceClient(base_url=url, api_key=make_key(data_dir, f"tenant-{i}")) for i in range(TENANTS)
        ]
        runs = [client.create_lora_training_client(BASE_MODEL, rank=RANK).result() for client in clients]
        for turn in range(rounds + 1):
            for kind, figure in (("direct", direct.steps(count)), ("through_api", through(runs, count))):
                if turn:
                    found[kind].append(figure)
    best = {kind: max(figures) for kind, figures in found.items()}
    ratio = best["through_api"] / best["direct"]
    result = {
        "bench": "through_api",
        "compares": "tokens/s of 16 tenants through the API with the same trainer called directly, in turns",
        "machine": machine(),
        "tokens_per_s": found,
        "best_tokens_per_s": best,
        "claims": [at_least("through the API / directly, 16 tenants", ratio, 0.85)],
    }
    tell(result, args)


if __name__ == "__main__":
    as_workers_run()
    main()
