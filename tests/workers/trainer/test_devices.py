"""The trainer with a bfloat16 base, and on a GPU: the results of float32 on the CPU, as nearly as the base allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scheduler.links.messages import OpKind
from tests.workers.model.models import ours
from tests.workers.trainer.kit import Bench, ce_data, output, rl_data
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

#: Device, dtype of the base, and how far log-probabilities may differ.
TARGETS = [
    pytest.param("cpu", torch.bfloat16, 0.15, id="cpu-bfloat16"),
    pytest.param("cuda", torch.float32, 5e-3, id="cuda-float32", marks=on_gpu),
    pytest.param("cuda", torch.bfloat16, 0.15, id="cuda-bfloat16", marks=on_gpu),
]
LENGTHS = {"a": [9, 30], "b": [17], "c": [4, 4, 4, 25]}


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    ours(model, folder)
    return folder


def train(decoder: Decoder, root: Path) -> tuple[dict[str, list[np.ndarray[Any, Any]]], Bench]:
    """Three runs of different ranks and optimizers, two steps together; the log-probabilities after them."""
    bench = Bench(decoder, root)
    bench.ok(*(bench.create(run_id, rank) for run_id, rank in (("a", 4), ("b", 8))))
    bench.ok(bench.create("c", 2, optimizer="dimuon"))
    for step in range(2):
        bench.ok(
            *(bench.fb(run_id, ce_data(LENGTHS[run_id], step)) for run_id in ("a", "c")),
            bench.fb("b", rl_data(LENGTHS["b"], step), "importance_sampling"),
            *(bench.optim(run_id) for run_id in ("a", "b")),
            bench.dimuon("c"),
        )
    ops = {run_id: bench.fb(run_id, ce_data(lengths, 9)) for run_id, lengths in LENGTHS.items()}
    dones = bench.ok(*ops.values())
    return {run_id: output(dones[op.op_id])[0] for run_id, op in ops.items()}, bench


@pytest.mark.parametrize(("device", "dtype", "tolerance"), TARGETS)
def test_training_is_that_of_the_cpu(
    folder: Path, decoder: Decoder, tmp_path: Path, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    found, bench = train(load_decoder(folder, dtype, device), tmp_path / "found")
    wanted, _ = train(decoder, tmp_path / "wanted")
    for run_id, logprobs in found.items():
        for mine, theirs in zip(logprobs, wanted[run_id], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=tolerance, rtol=tolerance)
        run = bench.run(run_id)
        assert run.adapter.flat.device.type == device
        assert run.adapter.flat.dtype == torch.float32


@pytest.mark.parametrize(("device", "dtype", "tolerance"), TARGETS)
def test_a_checkpoint_goes_on_where_it_was(
    folder: Path, tmp_path: Path, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    decoder = load_decoder(folder, dtype, device)
    _, bench = train(decoder, tmp_path / "blobs")
    bench.ok(bench.op("a", OpKind.SAVE_STATE, target_ref="saved"))
    bench.ok(bench.create("copy", 4, source_ref="saved", with_optimizer=True))
    assert torch.equal(bench.run("copy").adapter.flat, bench.run("a").adapter.flat)
    assert bench.run("copy").step == 2


@pytest.mark.parametrize(("device", "dtype", "tolerance"), TARGETS)
def test_a_tenant_is_the_same_in_company(
    folder: Path, tmp_path: Path, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Equal up to rounding: on a GPU the products with the base may round by the size of the batch."""
    decoder = load_decoder(folder, dtype, device)
    data = ce_data([20, 11], 3)
    results = []
    for company in (False, True):
        bench = Bench(decoder, tmp_path / f"world{company}")
        bench.ok(bench.create("mine"), *([bench.create("other", 8)] if company else []))
        op = bench.fb("mine", data)
        done = bench.ok(op, *([bench.fb("other", ce_data([40], 4))] if company else []))[op.op_id]
        results.append(np.concatenate(output(done)[0]))
    np.testing.assert_allclose(results[0], results[1], atol=tolerance, rtol=tolerance)
