"""Decode steps over fixed tensors, in the engine, against plain decoding: requests come and go, with adapters of mixed
ranks and targets. On the CPU kernels run in Triton's interpreter, and a tape stands in for CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.generator.conftest import EOS, run, until_read
from tests.workers.generator.gpu.tape import Tape
from tests.workers.model import gpu_kit
from tests.workers.model.gpu_kit import CONFIG, DENSE, DEVICE, GROUPS, SINKS, random_decoder
from workers.generator import forward
from workers.generator.cache.kv_cache import PAGE_TOKENS, KVCache
from workers.generator.engine import GenerateRequest, SamplingParams
from workers.generator.gpu import step as module, steps
from workers.generator.gpu.ahead import Ahead
from workers.generator.gpu.capture import Capture
from workers.generator.gpu.step import Step
from workers.generator.gpu.steps import Computed, DecodeSteps, bucket
from workers.generator.torch_engine import TorchEngine
from workers.model import routing
from workers.model.adapters.adapter import save_adapter
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.gpu.segments import forms
from workers.model.lora import base_mm, products as lora_products
from workers.model.native import gate

CONTEXT, SLOTS = 96, 6
#: A layer with a window and one without.
WINDOWS = replace(DENSE, num_layers=2, window=20, window_layers=(0,), sinks=True)

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="test_capture.py has what captures on a GPU")


@contextmanager
def device_code() -> Iterator[None]:
    """Adapters and experts in Triton, products with the base and activations by the library, as on a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_mm, "product", lambda *given, **more: None)
        patch.setattr(gate, "serves", lambda gate_up_PG: False)
        patch.setattr(lora_products, "on_device", lambda weight: True)
        patch.setattr(routing, "counts", lambda experts_TK: True)
        patch.setattr(base_mm, "in_triton", lambda x_PI: base_mm._replayed.get())
        yield


class Steps:
    """Stands for an engine's plain decoding, with DecodeSteps; checks each step's plan and pages."""

    def __init__(self, engine: TorchEngine, decoder: Decoder, capture: Capture[Computed] | None, context: int) -> None:
        self.cache = engine._cache
        decoder.rotary(torch.arange(context))  # as long as it gets: on a device it is from the start
        self.steps = DecodeSteps(decoder, self.cache, slots=SLOTS, context=context, capture=capture)
        self.rows: list[int] = []
        self.ahead = 0
        #: Who has held each page, in which group of layers; and the most pages that one row has given back.
        self.holders: dict[int, set[tuple[str, int]]] = {}
        self.gone = 0

    def __call__(self, plan: forward.DecodePlan, after: Tensor | None = None) -> Tensor:
        before = [pool.clone() for pool in self.cache.k_NKDP + self.cache.v_NKPD]
        with device_code():
            found = self.steps(plan, after)
        rows = plan.rows if after is None else plan.next_rows
        self.rows.append(len(rows))
        self.ahead += after is not None
        for row in rows:
            for group, held in enumerate(row.pages):
                self.gone = max(self.gone, held.gone)
                for page in held.pages:
                    self.holders.setdefault(page, set()).add((row.owner.request.id, group))
        written = {held.of(row.position) for row in rows for held in row.pages} | {self.cache.scratch}
        for pool, then in zip(self.cache.k_NKDP + self.cache.v_NKPD, before, strict=True):
            changed = (pool != then).flatten(1).any(dim=1).nonzero().flatten().tolist()
            assert set(changed) <= written, "a page of somebody else was written to"
        return found


def saved(config: DecoderConfig, folder: Path) -> dict[str, Path]:
    """Adapters of ranks below and above one block, of fewer targets, and with pairs of their own for each expert."""
    kinds: dict[str, tuple[int, dict[str, bool]]] = {
        "small": (3, {}),
        "also small": (8, {}),
        "large": (20, {}),
        "attention": (4, {"train_mlp": False, "train_unembed": False}),
        "experts": (5, {"train_attn": False, "shared": False}),
    }
    found = {name: folder / str(seed) for seed, name in enumerate(kinds)}
    for seed, (name, (rank, targets)) in enumerate(kinds.items()):
        save_adapter(gpu_kit.adapter(config, rank, seed, **targets), found[name], base_model="tiny")
    return found


def requests(folders: dict[str, Path], names: list[str]) -> list[GenerateRequest]:
    """Prompts and lengths of many sizes, so that the running set changes nearly every step and pages are added."""
    found = []
    for i, name in enumerate(names):
        sampling = SamplingParams(max_tokens=2 + i, temperature=0.7, seed=i)
        prompt = tuple(3 + (7 * i + j) % 60 for j in range(29 + i % 4))
        found.append(
            GenerateRequest(
                f"r{i}", prompt, sampling, num_samples=1 + i % 2, adapter=name, adapter_folder=folders.get(name)
            )
        )
    return found


def compare(
    config: DecoderConfig,
    wanted: list[GenerateRequest],
    capture: Capture[Computed] | None,
    context: int = CONTEXT,
    lookup: int = 0,
    **options: Any,
) -> Steps:
    """Decode the same requests plainly and as a device does: by steps, launched ahead or with prompt lookup."""
    engines = [
        TorchEngine(random_decoder(config), EOS, slots=SLOTS, context=context, lookup=most, **options)
        for most in (0, lookup)
    ]
    used = engines[1]._decoding.launch = Steps(engines[1], random_decoder(config), capture, context)
    engines[1]._decoding.ahead = None if lookup else Ahead(engines[1]._seating)
    for engine in engines:
        for request in wanted:
            engine.add(request)
        until_read(engine)  # else the rows of a step would depend on the disk
    plain, stepped = (run(engine) for engine in engines)
    assert (used.ahead > 0) == (lookup == 0)
    assert (engines[1].stats().accepted_tokens > 0) == (lookup > 0)
    for request in wanted:
        assert stepped[request.id].error is None, stepped[request.id].error
        pairs = zip(plain[request.id].sequences, stepped[request.id].sequences, strict=True)
        for one, other in pairs:
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(other.logprobs, one.logprobs, atol=2e-5)
            assert (one.routed_experts is None) == (other.routed_experts is None)
            if one.routed_experts is not None and other.routed_experts is not None:
                np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
    return used


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIG, id="moe", marks=pytest.mark.long),  # all that it has, GROUPS has
        pytest.param(DENSE, id="dense"),
        pytest.param(SINKS, id="sinks"),
        pytest.param(GROUPS, id="groups"),
    ],
)
def test_steps_decode_as_plain_decoding(config: DecoderConfig, tmp_path: Path) -> None:
    names = ["small", "", "large", "also small", "attention", "experts", "small"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "MAX_STEPS", 2)
        used = compare(config, requests(saved(config, tmp_path), names), None)
    assert len(set(used.rows)) > 3, "the running set was to change"
    assert len(used.steps._steps) == 2


def test_replays_decode_as_plain_decoding(tmp_path: Path) -> None:
    """A capture made with one set of rows serves others, with other adapters of the same forms."""
    tape = Tape()
    names = ["small", "also small", "", "small", "also small", "", "also small", "small"]
    wanted = [replace(each, return_routed_experts=True) for each in requests(saved(CONFIG, tmp_path), names)]
    compare(CONFIG, wanted, tape)
    assert tape.captured >= 2
    assert tape.replayed >= tape.captured + 3


def test_steps_try_tokens_ahead() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, stop_at_eos=False)
    compare(DENSE, [GenerateRequest("r", (9,) * 12, greedy)], None, lookup=4)


@pytest.mark.parametrize("capture", [None, Tape()], ids=["pieces", "replayed"])
def test_windows_give_back_pages_while_steps_decode_as_plain_decoding(capture: Tape | None) -> None:
    """Sequences that pass their window, and others that grow into the pages given back, of whichever group of layers;
    also in a step that was taken down before."""
    wanted = [
        GenerateRequest(
            f"r{i}",
            tuple(3 + (7 * i + j) % 60 for j in range(length)),
            SamplingParams(max_tokens=tokens, temperature=0.7, seed=i, stop_at_eos=False),
        )
        for i, (length, tokens) in enumerate([(48, 9), (58, 10), (26, 10)])
    ]
    used = compare(WINDOWS, wanted, capture, kv_tokens=11 * PAGE_TOKENS, prefix_bytes=0)
    assert used.cache.groups == 2
    assert used.gone == 1
    again = [found for found in used.holders.values() if len(found) > 1]
    assert any(len({request for request, _ in found}) > 1 for found in again), "a page was to be another's later"
    assert any(len({group for _, group in found}) > 1 for found in again), "and of another group of layers"
    if capture is not None:
        assert capture.replayed > 5


def test_a_step_does_not_hold_the_adapters_it_had() -> None:
    decoder = random_decoder(DENSE)
    adapter = gpu_kit.adapter(DENSE, 4, seed=0)
    other = gpu_kit.adapter(DENSE, 7, seed=1)
    cache = KVCache(layers=1, pages=4, kv_heads=1, head_dim=24, device=DEVICE)
    step = Step(decoder, cache, rows=4, width=3, forms=forms([adapter, other]))
    step.load([adapter, other])
    held = ref(adapter)
    del adapter
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("sent", [1, 2, 3])
def test_a_step_reads_its_own_pages_after_one_whose_inputs_were_not_all_sent(
    sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pinned memory for the rest: otherwise a row would read the pages of the sequence that had it before."""
    cache = KVCache(layers=1, pages=9, kv_heads=1, head_dim=24, device=DEVICE)
    step = Step(random_decoder(DENSE), cache, rows=3, width=2, forms=())
    first, second = (np.arange(6, dtype=np.int32).reshape(1, 3, 2) + n for n in (0, 3))
    step.feed([1, 2, 3], [0, 0, 0], first)
    put, calls = module._put, 0

    def full(target: Tensor, values: np.ndarray[Any, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls > sent:
            raise torch.OutOfMemoryError("no pinned memory")
        put(target, values)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_put", full)
        with pytest.raises(torch.OutOfMemoryError):
            step.feed([1, 2, 3], [0, 0, 0], second)
    for wanted in (second, first):
        step.feed([1, 2, 3], [0, 0, 0], wanted)
        assert step._table_GRW.tolist() == wanted.tolist()


def test_ranks_of_one_form_fill_the_same_blocks() -> None:
    ranks = (1, 16, 17, 20, 100, 128, 129, 300)
    rounded = [next(iter(forms([gpu_kit.adapter(DENSE, rank, seed=0)]))).rank for rank in ranks]
    assert rounded == [16, 16, 32, 32, 128, 128, 256, 384]
    assert len(forms([gpu_kit.adapter(DENSE, 3, 0), None, gpu_kit.adapter(DENSE, 9, 1)])) == 1


def test_buckets() -> None:
    assert [bucket(rows, 48) for rows in (1, 2, 3, 8, 9, 32, 33, 48)] == [1, 2, 4, 8, 16, 32, 48, 48]
