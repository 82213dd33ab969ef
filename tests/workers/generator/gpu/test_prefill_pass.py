"""Prefills through the code of a device: what the engine samples and scores is what it does block by block; how many
launches they are; and that they wait for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.workers.generator.conftest import EOS, run
from tests.workers.generator.gpu.launches import Launched, counted
from tests.workers.generator.gpu.test_steps import saved
from tests.workers.model.gpu_kit import CONFIG, DENSE, DEVICE, SINKS, random_decoder
from tests.workers.model.test_gpu_placement import CUDA, Indexing, Launches, launches  # noqa: F401
from workers.generator import forward
from workers.generator.adapters import HeldAdapter
from workers.generator.cache import kv_cache
from workers.generator.cache.kv_cache import KVCache, pages_of
from workers.generator.cache.page_groups import Held, page_groups
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.gpu import prefill_kernels
from workers.generator.gpu.step import Step
from workers.generator.requests.progress import RequestProgress
from workers.generator.tokens.prompt_scores import PromptScores
from workers.generator.tokens.sampling import SamplingRows, chosen
from workers.generator.tokens.stop import StopRule
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.config import DecoderConfig
from workers.model.decoder import Decoder
from workers.model.gpu.segments import forms
from workers.model.lora import base_mm, products as lora_products

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CONTEXT = 224


class NothingWaits(Indexing):
    """Refuses to send anything to the device in a way that the host waits for, and for all that was launched before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = kwargs or {}
        if func is Tensor.to and CUDA in args and args[0].device.type == "cpu":
            assert options.get("non_blocking"), "a copy to the device that is waited for"
        assert func is not torch.tensor or options.get("device") is None, "a tensor that is made on the device"
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def device_code(*, paged: bool = True) -> Iterator[None]:
    """Prefills, copies of pages, adapters and experts use the code for devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "attends_in_pages", lambda cache: paged)
        patch.setattr(kv_cache, "in_one_launch", lambda device: paged)
        patch.setattr(lora_products, "on_device", lambda weight: True)
        patch.setattr(base_mm, "in_triton", lambda x_PI: True)
        yield


def requests(folders: dict[str, Path]) -> list[GenerateRequest]:
    """Prompts of many lengths, some with a common beginning, of several adapters; all are scored."""
    found = []
    for i, name in enumerate(["small", "", "large", "small", "", "attention", "experts", ""]):
        head = tuple(3 + (5 * j) % 60 for j in range(64 if i % 2 else 0))
        prompt = head + tuple(3 + (7 * i + 11 * j) % 60 for j in range(3 + 11 * i))
        sampling = SamplingParams(max_tokens=3, temperature=0.7, seed=i, stop_at_eos=False)
        scored = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_logprobs_last_n": 20 if i % 2 else None}
        found.append(
            GenerateRequest(
                f"r{i}",
                prompt,
                sampling,
                adapter=name,
                adapter_folder=folders.get(name),
                **scored,  # type: ignore[arg-type]
            )
        )
    return found


def close(one: Finished, other: Finished) -> None:
    assert other.error is None, other.error
    for mine, theirs in zip(one.sequences, other.sequences, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(theirs.logprobs, mine.logprobs, atol=5e-5)
    assert one.prompt_logprobs is not None
    assert other.prompt_logprobs is not None
    np.testing.assert_allclose(other.prompt_logprobs, one.prompt_logprobs, atol=5e-5)
    assert (one.facts.prefill, one.facts.cache_hit) == (other.facts.prefill, other.facts.cache_hit)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/workers/generator/test_devices.py has a GPU's engine")
@pytest.mark.parametrize(
    "config", [pytest.param(CONFIG, id="moe", marks=pytest.mark.long), pytest.param(SINKS, id="sinks")]
)
def test_prompts_are_computed_as_block_by_block(config: DecoderConfig, tmp_path: Path) -> None:
    """Whole, in pieces, and behind what the prefix cache has."""
    config = replace(config, context_length=CONTEXT)
    folders = saved(config, tmp_path)
    options = {"slots": 8, "context": CONTEXT, "prefill_tokens": 120}
    decoder = random_decoder(config)
    plain, paged = (TorchEngine(decoder, EOS, **options) for _ in range(2))  # type: ignore[arg-type]
    decoder.rotary(torch.arange(CONTEXT))
    wanted = run(plain, *requests(folders))
    with device_code():
        found = run(paged, *requests(folders))
    for id, result in wanted.items():
        close(result, found[id])
    assert any(result.facts.cache_hit for result in found.values())


def waiting(config: DecoderConfig, spans: list[tuple[int, int]], device: torch.device) -> list[RequestProgress]:
    """Requests whose prompts are to be computed from start to stop, every second one with an adapter."""
    found, page = [], 0
    for number, (start, stop) in enumerate(spans):
        request = GenerateRequest(f"r{number}", tuple(3 + j % 60 for j in range(stop)), prompt_logprobs=number == 0)
        held = None
        if number % 2:
            held = HeldAdapter(f"a{number}", weights=1)
            held.adapter = Adapter.zeros(AdapterShape(config, 4 * number), device=device)
        scores = PromptScores(request, config.vocab_size)
        progress = RequestProgress(request, StopRule(request.sampling, EOS, 8, None), held, scores, number)
        progress.computed, progress.goal = start, stop
        pages = []
        for _ in page_groups(config, CONTEXT):
            pages.append(Held(0, list(range(page, page + pages_of(stop)))))
            page += pages_of(stop)
        progress.sequences[0].pages = pages
        found.append(progress)
    return found


def cache_of(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> KVCache:
    groups = [group.layers for group in page_groups(config, CONTEXT)]
    return KVCache(layers=config.num_layers, pages=128, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
                   groups=groups, dtype=dtype, device=device)  # fmt: skip


def launched(config: DecoderConfig, spans: list[tuple[int, int]], *, paged: bool) -> Launched:
    with device_code(paged=paged), torch.inference_mode():
        decoder = random_decoder(config)
        decoder.rotary(torch.arange(CONTEXT))
        cache, batch = cache_of(config, torch.device("cpu"), torch.float32), waiting(config, spans, torch.device("cpu"))
        with counted() as launches:
            forward.prefill(decoder, cache, batch)
    return launches


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["moe", "dense"])
def test_launches_do_not_grow_with_prompts_or_their_lengths(config: DecoderConfig) -> None:
    config, spans = replace(config, num_layers=2), [(0, 200), (64, 150), (0, 1), (96, 170), (32, 200)]
    short, long = (launched(config, each, paged=True) for each in ([(0, 30), (0, 31)], spans))
    for counts in (short, long):
        assert (counts.kernels["store_blocks"], counts.kernels["attend_tiles"]) == (2, 2)
    assert long.operations["softmax"] == len(config.mixture_layers), "no attention is left to torch"
    assert long.total == short.total
    assert launched(config, spans, paged=False).total > 2 * long.total


def stepped(config: DecoderConfig, rows: int) -> Launched:
    """A decode step of so many sequences, with drawing from it, launched piece by piece."""
    adapters = [Adapter.zeros(AdapterShape(config, 4)) for _ in range(rows)]
    with device_code(), torch.inference_mode():
        decoder = random_decoder(config)
        decoder.rotary(torch.arange(CONTEXT))
        step = Step(
            decoder, cache_of(config, torch.device("cpu"), torch.float32), rows=rows, width=7, forms=forms(adapters)
        )
        step.load(adapters)
        sampling = SamplingRows.of([SamplingParams()] * rows, config.vocab_size, torch.device("cpu"))
        with counted() as launches:
            logits_RV, _ = step.compute()
            chosen(logits_RV, sampling, [0.5] * rows)
    return launches


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["moe", "dense"])
def test_launches_of_a_step_do_not_grow_with_its_rows(config: DecoderConfig) -> None:
    config = replace(config, num_layers=2)
    few, many = stepped(config, 16), stepped(config, 64)
    assert {many.kernels[name] for name in ("store", "partial", "combine")} == {2}
    assert many.operations["softmax"] == len(config.mixture_layers), "no attention is left to torch"
    assert many.total == few.total


@pytest.mark.parametrize("config", [CONFIG, DENSE, SINKS], ids=["moe", "dense", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_prefill_stays_on_the_device_and_never_waits(
    config: DecoderConfig,
    dtype: torch.dtype,
    launches: dict[str, Launches],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {name: Launches() for name in ("store_blocks", "attend_tiles")}
    for name, kernel in own.items():
        monkeypatch.setattr(prefill_kernels, name, kernel)
    with FakeTensorMode(), Indexing(), torch.inference_mode():
        decoder, cache = Decoder(config, dtype, CUDA), cache_of(config, CUDA, dtype)
        batch = waiting(config, [(0, 70), (64, 150), (0, 1)], CUDA)
        decoder.rotary(torch.empty(1, dtype=torch.int64, device=CUDA))
        with NothingWaits():
            logits = forward.prefill(decoder, cache, batch)
        assert [row.shape for row in logits] == [(config.vocab_size,)] * 3
        assert all(row.device == CUDA for row in logits)
    assert {kernel.count for kernel in own.values()} == {config.num_layers}
