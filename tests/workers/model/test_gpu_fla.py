"""Recurrences by kernels of fla-core: their inputs and the use of their results, tested with its documented formulas in
place of the kernels. If they are installed, the kernels themselves run in Triton's interpreter or on a device."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.model import gpu_kit
from tests.workers.model.gpu_kit import DEVICE, assert_same_grads
from tests.workers.model.models import ours, packed, random_adapter, reference
from tests.workers.model.naive_fla import NAIVE
from workers.model.adapters.adapter import Adapter
from workers.model.attend import PackedAttend
from workers.model.base.weights import load_decoder
from workers.model.decoder import Decoder
from workers.model.gpu import fla
from workers.model.isolation import probe
from workers.model.logprobs import target_logprobs
from workers.model.lora.rows import LoraRows
from workers.model.parts.gated_delta import GatedDelta
from workers.model.parts.mamba2 import Mamba2
from workers.model.recur import Packed

LENGTHS = [3, 70, 1, 33, 9]
FAMILIES = pytest.mark.parametrize("family", ["qwen3-next", "nemotron-h"])


def recurrent(decoder: Decoder) -> list[GatedDelta | Mamba2]:
    return [module for module in decoder.modules() if isinstance(module, GatedDelta | Mamba2)]


def adapters(decoder: Decoder) -> LoraRows:
    made = [random_adapter(decoder, rank, rank) for rank in (2, 3, 5)]
    grads = [Adapter(of.shape, torch.zeros_like(of.flat), of.scale) for of in made]
    return LoraRows([0, 3, 73, 107, 116], [*made, None], [*grads, None])


def moved(rows: LoraRows, device: torch.device) -> LoraRows:
    parts = ([a and Adapter(a.shape, a.flat.to(device), a.scale) for a in of] for of in (rows.adapters, rows.grads))
    return LoraRows(rows.offsets, *parts)


def trained(decoder: Decoder, rows: LoraRows) -> Tensor:
    tokens, positions = (t.to(decoder.device) for t in packed(LENGTHS, decoder.config.vocab_size))
    hidden = decoder(tokens, positions, PackedAttend(LENGTHS), rows)
    every = torch.arange(len(tokens), device=decoder.device)
    found = target_logprobs(decoder, hidden, every, tokens.roll(1), rows)
    (found * torch.linspace(-1, 1, len(tokens), device=decoder.device)).sum().backward()
    return found.detach().cpu()


@FAMILIES
@pytest.mark.parametrize("budget", [None, 0], ids=["kept", "recomputed"])
def test_training_is_that_of_sequences_one_by_one(
    family: str, budget: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decoder = ours(reference(family, vocab_size=97), tmp_path)
    decoder.activation_budget_bytes = budget
    wanted_rows, rows = adapters(decoder), adapters(decoder)
    wanted = trained(decoder, wanted_rows)
    monkeypatch.setattr(fla, "kernels", lambda: NAIVE)
    for layer in recurrent(decoder):
        monkeypatch.setattr(layer, "run", None)
        layer.packs = True
    torch.testing.assert_close(trained(decoder, rows), wanted, atol=1e-4, rtol=1e-4)
    assert_same_grads(rows.grads, wanted_rows.grads, 1e-4)


@FAMILIES
def test_rows_that_must_be_kept_apart_are(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decoder = ours(reference(family, vocab_size=97), tmp_path)
    decoder.isolation = "per-segment"
    for layer in recurrent(decoder):
        monkeypatch.setattr(layer, "run_packed", None)
        layer.packs = True
    trained(decoder, adapters(decoder))


@FAMILIES
def test_kernels_are_used_where_they_agree_with_torch_and_left_out_where_not(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = recurrent(ours(reference(family, vocab_size=97), tmp_path))[0]

    def tried(**changed: Any) -> tuple[bool, str]:
        monkeypatch.setattr(fla, "kernels", lambda: NAIVE._replace(**changed))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            return fla.agrees(layer, layer.config.in_size, torch.device("cpu")), caplog.text

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of shared memory")

    def off(of: Any, by: float) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            out, end = of(*arguments, **options)
            return out, end if end is None else end * by

        return call

    rule, step = ("delta_rule", "delta_step") if isinstance(layer, GatedDelta) else ("scan", "scan_step")
    assert tried() == (True, "")
    works, said = tried(refusal="wrong on this GPU", **{rule: broken})
    assert not works
    assert said.count("wrong on this GPU") == 1
    assert "out of shared memory" not in said
    for changed in ({rule: broken}, {"convolution": broken}, {step: broken}):
        works, said = tried(**changed)
        assert not works
        assert "out of shared memory" in said
    for name in (rule, step):
        for by in (1.05, float("nan")):
            works, said = tried(**{name: off(getattr(NAIVE, name), by)})
            assert not works
            assert "off by" in said


@pytest.mark.parametrize(
    ("capability", "triton", "refused"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.4.0+git1", True), ((9, 0), "3.3.1", False), ((9, 0), "3.7.1", False),
     ((8, 0), "3.6.0", False), ((10, 0), "3.6.0", False), ((9, 0), "3.10.0", False)],
)  # fmt: skip
def test_gradients_are_refused_where_the_library_refuses_them(
    capability: tuple[int, int], triton: str, refused: bool
) -> None:
    assert bool(fla.refusal(capability, triton)) is refused


@pytest.mark.parametrize(
    ("on_gpu", "dtype", "key_dim", "serves"),
    [
        (True, torch.bfloat16, 256, True),
        (True, torch.float16, 128, True),
        (True, torch.float32, 128, False),
        (True, torch.bfloat16, 257, False),
        (False, torch.bfloat16, 128, False),
    ],
)
def test_kernels_serve_a_base_of_16_bits_on_a_gpu(
    on_gpu: bool, dtype: torch.dtype, key_dim: int, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight: Any = SimpleNamespace(is_cuda=on_gpu, dtype=dtype)
    monkeypatch.setattr(fla, "kernels", lambda: NAIVE)
    assert fla.serves(weight, key_dim) == serves
    monkeypatch.setattr(fla, "kernels", lambda: None)
    assert not fla.serves(weight, key_dim)


def test_on_a_cpu_nothing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "kernels", lambda: pytest.fail("asked for kernels"))
    decoder = ours(reference("qwen3-next", vocab_size=97), tmp_path)
    probe(decoder)
    assert not any(layer.packs for layer in recurrent(decoder))


# The kernels themselves.


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, each with the first of its configurations: compiling and timing all of them takes minutes, and the
    interpreter cannot do it. In the interpreter a kernel's loops count with numbers of Triton's type."""
    if fla.kernels() is None:
        pytest.skip("fla-core is not installed (pip install 'weft-tuning-server[gpu]')")
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "do_bench", property(lambda self: lambda call, quantiles: (0.0,) * 3))
    monkeypatch.setattr(Autotuner, "check_disk_cache", lambda self, key, configs, bench: bench(), raising=False)
    if DEVICE.type == "cpu":
        for name in ("chunk_h", "chunk_delta_h"):
            monkeypatch.setattr(sys.modules[f"fla.ops.common.{name}"], "range", interpreted_range, raising=False)


def interpreted_range(*bounds: Any) -> Iterator[Any]:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    for i in range(*(int(n.handle.data.item()) if isinstance(n, tl.tensor) else n for n in bounds)):
        yield tl.tensor(TensorHandle(np.array([i], dtype=np.int32), tl.int32), tl.int32)


def inputs(lengths: list[int], groups: int, heads: int, dim: int, width: int) -> dict[str, Tensor]:
    generator, tokens = torch.Generator().manual_seed(len(lengths)), sum(lengths)
    q, k = torch.randn(2, tokens, groups, dim, generator=generator) * dim**-0.5
    v = torch.randn(tokens, heads, width, generator=generator)
    decay, rate = torch.rand(2, tokens, heads, generator=generator)
    starts = torch.randn(len(lengths), heads, dim, width, generator=generator)
    return {"q": q, "k": k / k.norm(dim=-1, keepdim=True), "v": v, "decay": -decay, "rate": rate, "starts": starts}


def trains() -> bool:
    """Whether the kernels have gradients on this device."""
    found = fla.kernels()
    assert found is not None
    return not found.refusal


def computed(rule: str, given: dict[str, Tensor], lengths: list[int], chunk: int, gradients: bool) -> list[Tensor]:
    """Output, last states and gradients by the kernels that `fla.kernels` names, on the device of the inputs."""
    at = {name: t.clone().requires_grad_(name != "starts") for name, t in given.items()}
    packs, starts = Packed(lengths, chunk=chunk, ends=True), list(at.pop("starts"))
    if rule == "delta_rule":
        out, ends = fla.delta_rule(at["q"], at["k"], at["v"], at["decay"], at["rate"], packs, starts)
    else:
        del at["rate"]
        out, ends = fla.scan(at["v"], at["k"], at["q"], at["decay"], packs, starts)
    grads = torch.autograd.grad(out.square().sum(), [*at.values()]) if gradients else ()
    return [t.detach().cpu() for t in (out, torch.stack(ends), *grads)]


TOLERANCE = 1e-4 if DEVICE.type == "cpu" else fla.TOLERANCE


def assert_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= TOLERANCE * other.abs().max()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("rule", ["delta_rule", "scan"])
@pytest.mark.parametrize(("lengths", "chunk"), [([2, 17], 64), ([40, 1], 32)], ids=["short", "chunks"])
def test_recurrences_of_fla_are_the_formula(
    rule: str, lengths: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, gradients = inputs(lengths, 1, 2, 16, 16), trains()
    found = computed(rule, {name: t.to(DEVICE) for name, t in given.items()}, lengths, chunk, gradients)
    monkeypatch.setattr(fla, "kernels", lambda: NAIVE)
    assert_near(found, computed(rule, given, lengths, chunk, gradients))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("rule", ["delta_rule", "scan"])
def test_a_sequence_has_the_same_bits_in_any_company_and_wherever_it_is_cut(rule: str) -> None:
    given = {name: t.to(DEVICE) for name, t in inputs([7, 40, 5], 1, 2, 16, 16).items()}
    out, ends, *gradients = computed(rule, given, [7, 40, 5], 32, trains())

    def part(start: int, stop: int, state: Tensor) -> list[Tensor]:
        own = {name: t[start:stop] for name, t in given.items() if name != "starts"}
        return computed(rule, own | {"starts": state[None].to(DEVICE)}, [stop - start], 32, trains())

    alone = part(7, 47, given["starts"][1])
    assert torch.equal(alone[0], out[7:47])
    assert torch.equal(alone[1][0], ends[1])
    assert all(torch.equal(one, other[7:47]) for one, other in zip(alone[2:], gradients, strict=True))
    first = part(7, 39, given["starts"][1])
    second = part(39, 47, first[1][0])
    assert torch.equal(torch.cat((first[0], second[0])), out[7:47])
    assert torch.equal(second[1][0], ends[1])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("delta", [True, False], ids=["delta_step", "scan_step"])
def test_steps_of_fla_are_the_formula(delta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs([1, 1, 1], 1, 2, 16, 16)

    def step(device: torch.device) -> list[Tensor]:
        q, k, v, decay, rate, starts = (t.to(device) for t in given.values())
        out, ends = fla.one_token(q, k, v, decay.exp(), rate if delta else None, list(starts))
        return [out.cpu(), torch.stack(ends).cpu()]

    found = step(DEVICE)
    monkeypatch.setattr(fla, "kernels", lambda: NAIVE)
    assert_near(found, step(gpu_kit.HOST))


@pytest.mark.usefixtures("installed")
def test_the_convolution_of_fla_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs are columns of a wider tensor, as in a layer; some sequences are shorter than the convolution."""
    lengths, generator = [2, 70, 1], torch.Generator().manual_seed(1)
    wide = torch.randn(sum(lengths), 24, generator=generator)
    weight, bias = torch.randn(12, 4, generator=generator), torch.randn(12, generator=generator)
    before = torch.randn(len(lengths), 3, 12, generator=generator)

    def convolved(device: torch.device) -> list[Tensor]:
        x = wide.to(device).requires_grad_()
        given = (x[:, 5:17], weight.to(device), bias.to(device), Packed(lengths, ends=True))
        y, _ = fla.convolved(*given, None)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        with torch.no_grad():
            z, ends = fla.convolved(*given, list(before.to(device)))
        return [t.detach().cpu() for t in (y, gradient, z, torch.stack(ends))]

    found = convolved(DEVICE)
    monkeypatch.setattr(fla, "kernels", lambda: NAIVE)
    assert_near(found, convolved(gpu_kit.HOST))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
@FAMILIES
def test_on_a_device_a_hybrid_trains_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    if fla.kernels() is None:
        pytest.skip("fla-core is not installed")
    on_cpu = ours(reference(family, vocab_size=97), tmp_path)
    decoder = load_decoder(tmp_path, torch.bfloat16, "cuda")
    probe(decoder)
    assert all(layer.packs is trains() for layer in recurrent(decoder)), "the log says why"
    wanted_rows = adapters(on_cpu)
    rows = moved(wanted_rows, DEVICE)
    wanted = trained(on_cpu, wanted_rows)
    near = torch.isclose(trained(decoder, rows), wanted, atol=0.15, rtol=0.15)
    assert (~near).float().mean() < 0.03, "but where a near tie of a router in bfloat16 chose another expert"
