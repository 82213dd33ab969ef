"""What trainer and generator of one host take of its memory together, and what a restart beside them reads.

    python bench/memory.py [--megabytes 400] [--json] [--out FILE]

Real worker processes on a model made for it, in float32. Both compute once, so that every weight was touched. Memory
is the proportional set size (smaps_rollup): a page that two processes map counts half in each; at rest, when workers
have given back what a pass takes, and right after the work. What the processes take without a model is measured apart,
with the built-in tiny model. The restart is that of the trainer, which had loaded
the weights, killed; the checkpoint is dropped from the page cache before, so whoever reads it reads the disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from weft.wire import ModelInput, SampleRequest, SamplingParams
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch, decode_train_output, encode_train_request

from bench.parts.results import asked, at_most, machine, tell
from bench.parts.worker import Worker
from scheduler.links.configs import Basics, GeneratorConfig, TorchConfig, TrainerBounds, TrainerConfig
from scheduler.links.messages import Done, OpKind, Pass, RunSpec, SampleOp, SampleWork, TrainOp
from store.blobs.folder import FolderBlobs
from workers.model.base.files import remove_unused
from workers.model.card import config_card
from workers.model.planning.check import check_model
from workers.model.planning.plan import PROCESS_BYTES, Device, Wanted, plan
from workers.model.tiny import TINY_PATH
from workers.rest import REST_S
from workers.trainer.process import IDLE_POLL_S

MODEL = "m"
TOKENS = 48
CONTEXT = 128


def make_model(folder: Path, megabytes: int) -> int:
    """A dense model of about this size in float32, its tokenizer the built-in model's. Returns the weights' bytes."""
    shape = json.loads((TINY_PATH / "config.json").read_text())
    hidden, wide, heads, head_dim, vocab = 1024, 4096, 8, 64, shape["vocab_size"]
    layer = hidden * (3 * wide + 4 * heads * head_dim)
    layers = max(1, round((megabytes * 2**20 / 4 - 2 * vocab * hidden) / layer))
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": wide, "vocab_size": vocab,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir(parents=True)
    for file in TINY_PATH.glob("*token*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    inner = heads * head_dim
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}
    for at in (f"model.layers.{number}." for number in range(layers)):
        shapes |= {at + f"self_attn.{name}_proj": (inner, hidden) for name in "qkv"}
        shapes |= {at + "self_attn.o_proj": (hidden, inner), at + "mlp.down_proj": (hidden, wide)}
        shapes |= {at + f"mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")}
        shapes |= {at + f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    numbers = torch.randn(hidden * wide, generator=torch.Generator().manual_seed(0)) / 32
    tensors = {f"{name}.weight": _filled(numbers, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


def _filled(numbers: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A weight of the first of these numbers, or one of a norm."""
    return numbers[: math.prod(shape)].view(shape).clone() if len(shape) > 1 else torch.ones(shape)


@dataclass
class Host:
    """A trainer and a generator of one host. `base_dir` "": each holds its own base."""

    model: Path
    data_dir: Path
    base_dir: str

    @property
    def _basics(self) -> Basics:
        models = {MODEL: str(self.model)}
        return Basics(str(self.data_dir), models, device="cpu", dtype="float32", base_dir=self.base_dir)

    def trainer(self) -> Worker:
        return Worker("trainer", TrainerConfig(self._basics, TrainerBounds(resident_bytes=1 << 26)))

    def generator(self, packed: bool = False) -> Worker:
        return Worker("generator", GeneratorConfig(self._basics, 4, CONTEXT, TorchConfig(packed=packed)))

    def train(self, trainer: Worker) -> bytes:
        """Create a run and train it once; returns the bytes of the log-probabilities."""
        ids = np.arange(TOKENS)
        datum = ArrayDatum(ids.astype(np.int32), {"target_tokens": ids, "weights": np.ones(TOKENS, np.float32)})
        body = encode_train_request(TrainBatch("r", 1, "cross_entropy", {}, False, [datum]))
        self._blobs.put("train", body)
        spec = RunSpec("r", MODEL, 2, 8.0, 0, True, False, False)
        make = TrainOp("create", "r", 0, OpKind.CREATE, spec=spec)
        trainer.send(Pass(1, MODEL, [make, TrainOp("fb", "r", 1, OpKind.FORWARD_BACKWARD, "train", stop=1)]))
        outputs, _ = decode_train_output([trainer.until(Done) for _ in range(2)][1].payload)
        return outputs[0]["logprobs"].tobytes()

    def sample(self, generator: Worker) -> bytes:
        """Sample some tokens after a prompt; returns the result."""
        sampling = SamplingParams(stop=[], max_tokens=4, seed=0)
        body = SampleRequest(prompt=ModelInput.from_ints(list(range(TOKENS))), sampling_params=sampling, num_samples=1)
        self._blobs.put("sample", body.model_dump_json(exclude_none=True).encode())
        generator.send(SampleWork([SampleOp("s", MODEL, "sample", 1)]))
        return generator.until(Done).payload

    @property
    def _blobs(self) -> FolderBlobs:
        return FolderBlobs(self.data_dir / "blobs")


def forget_pages(folder: Path) -> None:
    """Make the system drop a checkpoint from its page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@contextmanager
def pair(host: Host) -> Iterator[tuple[Worker, Worker]]:
    """Trainer and generator, after some work."""
    trainer = host.trainer()
    try:
        generator = host.generator()
        try:
            host.train(trainer)
            host.sample(generator)
            yield trainer, generator
        finally:
            generator.end(signal.SIGKILL)
    finally:
        trainer.end(signal.SIGKILL)


class Taken(NamedTuple):
    """Proportional set size of trainer and generator together."""

    at_rest: int
    after_work: int


def taken(model: Path, folder: Path, base_dir: str) -> Taken:
    with pair(Host(model, folder, base_dir)) as both:
        after_work = sum(worker.pss_bytes for worker in both)
        time.sleep(REST_S + 2 * IDLE_POLL_S)
        return Taken(sum(worker.pss_bytes for worker in both), after_work)


def restarted(host: Host) -> dict[str, Any]:
    """Let a trainer die and another one start, while a generator goes on."""
    trainer, generator = host.trainer(), host.generator()
    first = {"read_bytes": trainer.read_bytes, "ready_s": round(trainer.ready_s, 2)}
    before = host.train(trainer)
    trainer.end(signal.SIGKILL)
    forget_pages(host.model)
    again = host.trainer()
    try:
        second = {"read_bytes": again.read_bytes, "ready_s": round(again.ready_s, 2)}
        return {"first": first, "again": second, "same_bits": host.train(again) == before}
    finally:
        again.end(signal.SIGKILL)
        generator.end(signal.SIGKILL)


def planned(model: Path, workers: int) -> int:
    """What the memory plan counts for the weights and for that many processes."""
    check = check_model(config_card(MODEL, model), "float32")
    found = plan([check], Device("cpu", 1 << 40), Wanted(one_base=True, packed=False))
    weights = next(part.size_bytes for part in found.parts if part.name == "weights")
    return weights + workers * PROCESS_BYTES["cpu"]


def measured(folder: Path, megabytes: int) -> dict[str, Any]:
    model, base_dir = folder / "model", folder / "base"
    base_dir.mkdir()
    weights = make_model(model, megabytes)
    fixed = taken(TINY_PATH, folder / "tiny", "")
    shared, apart = taken(model, folder / "shared", str(base_dir)), taken(model, folder / "apart", "")
    forget_pages(model)
    remove_unused(base_dir)
    restart = restarted(Host(model, folder / "restart", str(base_dir)))
    copies = {
        "one base": (shared.at_rest - fixed.at_rest) / weights,
        "one base, right after work": (shared.after_work - fixed.after_work) / weights,
        "a copy each": (apart.at_rest - fixed.at_rest) / weights,
    }
    together, read = copies["one base"], restart["again"]["read_bytes"] / weights
    of_plan = shared.at_rest / planned(model, 2)
    return {
        "weights_mib": weights >> 20,
        "processes_mib": fixed.at_rest >> 20,
        "copies": copies,
        "restart": restart,
        "claims": [
            at_most("trainer and generator together, in copies of the weights", together, 1.15),
            at_most("share of the weights that a trainer reads when it starts again", read, 0.05),
            at_most("taken by weights and processes / planned", of_plan, 1),
        ],
    }


def main() -> None:
    parser = asked(__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        found = {"machine": machine(), **measured(Path(folder), args.megabytes)}
    tell(found, args)


if __name__ == "__main__":
    main()
