"""Every family in trouble: beside a neighbour whose numbers are not finite, and with a trainer that is killed.

`python -m pytest -m long tests/workers/test_families_in_trouble.py` kills a real trainer for each family by itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scheduler.links.configs import TrainerBounds
from scheduler.links.messages import Done, OpKind, Pass, PullPass, TrainOp
from tests.workers.model.models import ours, packed, random_adapter, reference
from tests.workers.test_families import CONTEXT, EACH, computed as computed_by, generate, prompt
from tests.workers.trainer.kit import Bench, ce_data, replayed
from tests.workers.trainer.ranks.worlds import plain
from tests.workers.trainer.test_process import Worker
from workers.generator.engine import GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder

#: One model for each kind of state that a layer keeps (keys and values, latents, a recurrence's states), mixtures of
#: experts and attention sinks among them.
KINDS = ["llama", "deepseek", "qwen3.5-moe", "gpt-oss", "nemotron-h"]
FAR = [math.nan, math.inf, 1e30]


@pytest.fixture(params=EACH)
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    return ours(reference(request.param, max_position_embeddings=CONTEXT), tmp_path / "model")


def spoilt(adapter: Adapter, by: float) -> Adapter:
    adapter.flat.mul_(by)
    return adapter


@pytest.mark.parametrize("isolation", ["padded", "per-segment"])
def test_numbers_that_are_not_finite_stay_with_their_run(decoder: Decoder, isolation: str) -> None:
    """Neighbours before and after the run have sequences of the same lengths, which attention computes together."""
    decoder.isolation = isolation
    lengths, own = [19, 40, 19, 40], slice(19, 78)
    tokens, positions = packed(lengths, decoder.config.vocab_size)
    good = random_adapter(decoder, 3, 5)
    alone = computed_by(decoder, tokens[own], positions[own], [40, 19], [0, 59], [good])
    for by in FAR:
        before, after = random_adapter(decoder, 6, 7), random_adapter(decoder, 5, 8, train_mlp=False, whole=True)
        crowd = [spoilt(before, by), good, spoilt(after, by)]
        lp, grads = computed_by(decoder, tokens, positions, lengths, [0, 19, 78, 118], crowd)
        assert not lp[:19].isfinite().any()
        assert not lp[78:].isfinite().any()
        assert torch.equal(lp[own], alone[0])
        assert torch.equal(grads[1], alone[1][0])


def test_numbers_that_are_not_finite_stay_with_their_request(decoder: Decoder, tmp_path: Path) -> None:
    """With the kernels of packed weights."""
    decoder.pack()
    assert_requests_are_apart(decoder, tmp_path)


@pytest.mark.parametrize("decoder", KINDS, indirect=True)
def test_numbers_that_are_not_finite_stay_with_their_request_unpacked(decoder: Decoder, tmp_path: Path) -> None:
    assert_requests_are_apart(decoder, tmp_path)


def assert_requests_are_apart(decoder: Decoder, tmp_path: Path) -> None:
    """Check requests beside the spoilt one, and requests that get its pages and states after it."""
    save_adapter(random_adapter(decoder, 3, 2), tmp_path / "good", base_model="tiny")

    def request(name: str, adapter: str, length: int, **params: Any) -> GenerateRequest:
        chosen, folder = SamplingParams(**params), tmp_path / adapter if adapter else None
        return GenerateRequest(
            name, prompt(length, decoder.config.vocab_size, length), chosen, prompt_logprobs=True,
            adapter=adapter or None, adapter_folder=folder,
        )  # fmt: skip

    mine = [request("a", "good", 41, max_tokens=10, seed=1), request("b", "", 20, max_tokens=10, seed=1, top_k=9)]
    alone = generate(TorchEngine(decoder, (), slots=8, context=CONTEXT), *mine)
    for by in FAR[::2]:
        save_adapter(spoilt(random_adapter(decoder, 6, 7), by), tmp_path / f"by {by}", base_model="tiny")
        others = [
            request("x", f"by {by}", 41, max_tokens=9, seed=1),
            request("y", f"by {by}", 7, max_tokens=9, temperature=0),
        ]
        engine = TorchEngine(decoder, (), slots=8, context=CONTEXT)
        crowd = generate(engine, others[0], mine[0], others[1], mine[1])
        assert all("not finite" in str(crowd[name].error) for name in "xy")
        for found in (crowd, generate(engine, *mine)):
            for name in "ab":
                (got,), (wanted,) = found[name].sequences, alone[name].sequences
                assert got.tokens.tolist() == wanted.tokens.tolist()
                assert np.array_equal(got.logprobs, wanted.logprobs)


def test_another_trainer_replays_a_run_to_the_same_bits(decoder: Decoder, tmp_path: Path) -> None:
    """With an accumulated gradient, and beside a run that begins only then."""
    bench = Bench(decoder, tmp_path / "blobs")
    done, left = (ops := operations(bench, "tiny", "lost"))[:4], ops[4:]
    bench.ok(*done)
    bench.restart()
    bench.ok(*map(replayed, done), *left, *operations(bench, "tiny", "calm"))
    lost, calm = bench.run("tiny-lost"), bench.run("tiny-calm")
    assert lost.grad is not None
    assert calm.grad is not None
    for one, other in zip((lost.adapter, lost.grad), (calm.adapter, calm.grad), strict=True):
        assert torch.equal(one.flat, other.flat)
    assert torch.equal(lost.m, calm.m)
    assert torch.equal(lost.v, calm.v)


@pytest.mark.parametrize("names", [KINDS, *(pytest.param([name], marks=pytest.mark.long) for name in EACH)], ids=str)
def test_a_killed_trainer_is_replayed_to_the_same_bits(names: list[str], tmp_path: Path) -> None:
    """A real process, with a model for each kind of state, gets SIGKILL in the middle of a pass, while every run has an
    accumulated gradient. The replay in the next process is compared with a run that was never killed."""
    folders = {name: tmp_path / name for name in names}
    for name, folder in folders.items():
        reference(name).save_pretrained(folder)
    bench = Bench(load_decoder(folders[names[0]]), tmp_path / "data" / "blobs")
    lost = {name: operations(bench, name, "lost") for name in names}
    calm = {name: operations(bench, name, "calm") for name in names}
    answered: dict[str, list[bytes]] = {}
    with Worker(tmp_path / "data", folders, TrainerBounds()).until_killed() as worker:
        for name in names[:-1]:
            answered[name] = _answers(worker, name, lost[name][:4], 4)
        answered[names[-1]] = _answers(worker, names[-1], lost[names[-1]], 3)
    with Worker(tmp_path / "data", folders, TrainerBounds()).until_killed() as worker:
        for name, ops in lost.items():
            done = len(answered[name])
            answered[name] += _answers(worker, name, [*map(replayed, ops[:done]), *ops[done:]], len(ops) - done)
            assert answered[name] == _answers(worker, name, calm[name], len(ops)), name
            saved = [
                [file.read_bytes() for file in sorted(bench.blobs.path(f"{name}-{run}").glob("*.safetensors"))]
                for run in ("lost", "calm")
            ]
            assert saved[0] == saved[1] != [], name


def operations(bench: Bench, model: str, run: str) -> list[TrainOp]:
    """Three batches with a step after each of the first two, and a save while the third's gradient is not yet used."""
    name = f"{model}-{run}"
    ops = [bench.create(name, rank=3, base_model=model, seed=7)]
    for batch in range(3):
        ops += [bench.fb(name, ce_data([17, 40], seed=batch)), bench.optim(name)]
    return [*ops[:-1], bench.op(name, OpKind.SAVE_STATE, target_ref=name)]


def _answers(worker: Worker, model: str, ops: list[TrainOp], count: int) -> list[bytes]:
    """Send the operations as one pass and read so many answers."""
    while not isinstance(worker.recv(), PullPass):
        pass
    worker.send(Pass(1, model, ops))
    by_id, found = {op.op_id: op for op in ops}, []
    while len(found) < count:
        message = worker.recv()
        if isinstance(message, Done):
            assert message.failure is None, message.failure
            found.append(plain(by_id[message.op_id], message))
    return found
