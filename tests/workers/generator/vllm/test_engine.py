"""VllmEngine against TorchEngine on the model that comes with Weft: the same logprobs, the same tokens, the same bill;
and what it declines."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.workers.generator.conftest import run
from workers.generator.engine import GenerateRequest, RequestError, SamplingParams, TargetTokens
from workers.generator.torch_engine import TorchEngine
from workers.generator.vllm.engine import VllmEngine
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.base.weights import load_decoder
from workers.model.families.read import read_config
from workers.model.tiny import TINY_PATH

from .conftest import CONTEXT, EOS, LIMITS
from .test_contract import finish

pytestmark = pytest.mark.vllm
CONFIG = read_config("tiny", TINY_PATH)


@pytest.fixture(scope="module")
def torch_engine() -> TorchEngine:
    return TorchEngine(load_decoder(TINY_PATH), EOS, slots=16, context=CONTEXT)


def adapter(folder: Path, torch_engine: TorchEngine, number: int, *, unembed: bool = False, rank: int = 4) -> Path:
    shape = AdapterShape(CONFIG, rank, number != 1, number != 2, unembed)
    made = Adapter.init(shape, seed=number, scale=0.7)
    made.flat.add_(torch.randn(made.flat.shape, generator=torch.Generator().manual_seed(number)), alpha=0.03)
    save_adapter(made, folder / f"a{number}", base_model="tiny", details={"step": 5 + number})
    return folder / f"a{number}"


def prompt(seed: int, length: int = 24) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(10, 1500, length))


def test_both_engines_agree(engine: VllmEngine, torch_engine: TorchEngine, tmp_path: Path) -> None:
    """What vLLM samples, TorchEngine scores: the base model and three adapters in one batch."""
    folders = {f"a{n}": adapter(tmp_path, torch_engine, n, rank=8 if n == 2 else 3) for n in range(3)}
    requests = [
        GenerateRequest(
            f"r{i}",
            prompt(i),
            SamplingParams(max_tokens=40, seed=i, temperature=1.0, stop_at_eos=i % 2 == 0),
            num_samples=2,
            adapter=name,
            adapter_folder=folders.get(name),
            prompt_logprobs=True,
            topk_prompt_logprobs=3,
            topk_sample_logprobs=2,
        )
        for i, name in enumerate(["", *folders] * 3)
    ]
    found = finish(engine, *requests)
    one = SamplingParams(max_tokens=1)
    for request in requests:
        ours = found[request.id]
        assert ours.error is None
        assert ours.facts.prefill + ours.facts.cached_prefill == 48
        for sequence in ours.sequences:
            whole = (*request.prompt, *sequence.tokens.tolist())
            scored = replace(request, prompt=whole, sampling=one, num_samples=1, topk_prompt_logprobs=3)
            theirs = run(torch_engine, scored)[request.id]
            assert theirs.prompt_logprobs is not None
            assert theirs.topk_prompt_logprobs is not None
            np.testing.assert_allclose(sequence.logprobs, theirs.prompt_logprobs[24:], atol=1e-4)
            np.testing.assert_allclose(ours.prompt_logprobs, theirs.prompt_logprobs[:24], atol=1e-4)
            top = theirs.topk_prompt_logprobs
            assert ours.topk_prompt_logprobs is not None
            np.testing.assert_allclose(ours.topk_prompt_logprobs.logprobs[1:], top.logprobs[1:24], atol=1e-4)
            assert sequence.topk is not None
            np.testing.assert_allclose(sequence.topk.logprobs, top.logprobs[24:, :2], atol=1e-4)
        assert [span.version for span in ours.sequences[0].policy] == [
            {"": 0, "a0": 5, "a1": 6, "a2": 7}[request.adapter]
        ]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.7])
def test_logprobs_at_a_temperature(engine: VllmEngine, torch_engine: TorchEngine, temperature: float) -> None:
    """Before the cuts, after the temperature."""
    sampling = SamplingParams(max_tokens=30, temperature=temperature, top_p=0.7, top_k=20, seed=1, stop_at_eos=False)
    request = GenerateRequest("r", prompt(1), sampling, topk_sample_logprobs=2)
    sequence = finish(engine, request)["r"].sequences[0]
    ids = torch.tensor([*request.prompt, *sequence.tokens.tolist()])
    scored = GenerateRequest("s", tuple(ids.tolist()), SamplingParams(max_tokens=1), topk_prompt_logprobs=1560)
    table = run(torch_engine, scored)["s"].topk_prompt_logprobs
    assert table is not None
    for i, token in enumerate(sequence.tokens.tolist()):
        row = torch.from_numpy(table.logprobs[24 + i]) / (temperature or 1.0)
        at = table.token_ids[24 + i].tolist().index(token)
        assert sequence.logprobs is not None
        assert sequence.logprobs[i] == pytest.approx(float(torch.log_softmax(row, -1)[at]), abs=1e-4)


def test_greedy_tokens_are_the_same(engine: VllmEngine, torch_engine: TorchEngine, tmp_path: Path) -> None:
    folder = adapter(tmp_path, torch_engine, 0)
    sampling = SamplingParams(max_tokens=60, temperature=0)
    requests = [
        GenerateRequest("base", prompt(3), sampling),
        GenerateRequest("adapted", prompt(3), sampling, adapter="greedy", adapter_folder=folder),
    ]
    ours, theirs = finish(engine, *requests), run(torch_engine, *requests)
    for name in ("base", "adapted"):
        assert ours[name].sequences[0].tokens.tolist() == theirs[name].sequences[0].tokens.tolist()
        assert ours[name].sequences[0].stop_reason == theirs[name].sequences[0].stop_reason
        assert ours[name].facts == theirs[name].facts


# -- what it declines


def declined(engine: VllmEngine, request: GenerateRequest) -> RequestError:
    error = finish(engine, request)[request.id].error
    assert error is not None
    return error


def test_adapters_that_it_cannot_serve(engine: VllmEngine, torch_engine: TorchEngine, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "unembed", torch_engine, 0, unembed=True)
    error = declined(engine, GenerateRequest("r", prompt(0), adapter="with lm_head", adapter_folder=folder))
    assert (error.category, error.elsewhere) == ("user", "weights")
    assert "train_unembed" in error.message
    folder = adapter(tmp_path / "rank", torch_engine, 0, rank=9)
    error = declined(engine, GenerateRequest("r", prompt(0), adapter="of rank 9", adapter_folder=folder))
    assert error.elsewhere == "weights"
    assert "9" in error.message
    assert "8" in error.message
    assert str(tmp_path) not in error.message
    shape = AdapterShape(CONFIG, 4, True, False, False)
    broken = Adapter.init(shape, seed=0)
    broken.flat.fill_(float("nan"))
    save_adapter(broken, tmp_path / "nan", base_model="tiny")
    error = declined(engine, GenerateRequest("r", prompt(0), adapter="nan", adapter_folder=tmp_path / "nan"))
    assert "not finite" in error.message


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"target_tokens": TargetTokens(np.array([0]), np.array([3]))}, "target_prompt_logprobs"),
        ({"topk_sample_logprobs": 1025}, "1024"),
        ({"sampling": SamplingParams(temperature=2.5)}, "temperature"),
    ],
)
def test_requests_that_it_cannot_serve(engine: VllmEngine, fields: dict[str, object], word: str) -> None:
    error = declined(engine, replace(GenerateRequest("r", prompt(0)), **fields))  # type: ignore[arg-type]
    assert (error.category, error.elsewhere) == ("user", "request")
    assert word in error.message


def test_more_adapters_than_there_is_room_for(engine: VllmEngine, torch_engine: TorchEngine, tmp_path: Path) -> None:
    """24 adapters over 8 slots: the right one for each, and those used longest ago are let go."""
    sampling = SamplingParams(max_tokens=5, temperature=0)
    folders = [adapter(tmp_path / str(i), torch_engine, 10 + i) for i in range(24)]
    requests = [
        GenerateRequest(f"r{i}", prompt(i), sampling, adapter=f"many{i}", adapter_folder=folder)
        for i, folder in enumerate(folders)
    ]
    ours, theirs = finish(engine, *requests), run(torch_engine, *requests)
    for request in requests:
        np.testing.assert_allclose(
            ours[request.id].sequences[0].logprobs, theirs[request.id].sequences[0].logprobs, atol=1e-4
        )
    assert engine.stats().adapters_loaded <= 2 * LIMITS.max_adapters


# -- when it dies (last: the others share it)


def processes(engine: VllmEngine) -> list[psutil.Process]:
    path = engine.url.removeprefix("unix:")
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if "guard.py" in (command := " ".join(child.cmdline())) and path in command:
                return [child, *child.children(recursive=True)]
    raise LookupError(path)


@pytest.mark.timeout(600)
def test_a_crash_gives_back_what_ran_and_everything_works_again(
    engine: VllmEngine, torch_engine: TorchEngine, tmp_path: Path
) -> None:
    folder = adapter(tmp_path, torch_engine, 0)
    request = GenerateRequest(
        "r",
        prompt(7),
        SamplingParams(max_tokens=200, seed=3, stop_at_eos=False),
        adapter="crash",
        adapter_folder=folder,
    )
    calm = finish(engine, request)["r"].sequences[0]
    before = processes(engine)
    for _ in range(20):  # until its engine is stopped while the request is there
        engine.add(request)
        time.sleep(0.05)
        for process in before[-2:]:  # its engine, not its front
            process.suspend()
        if not [finished for _ in range(20) for finished in engine.step()]:
            break
        for process in before[-2:]:
            process.resume()
    for process in before[-2:]:
        process.kill()
    error = finish(engine)["r"].error
    assert error is not None
    assert (error.category, error.elsewhere) == ("server", "again")
    assert engine.free_slots == 0
    again = finish(engine, request)["r"].sequences[0]  # waits for the next life
    assert again.tokens.tolist() == calm.tokens.tolist()
    assert [span.version for span in again.policy] == [5]
    assert engine.free_slots == 64
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in before)


def test_a_vllm_that_rounds_declines_adapters_and_says_why(engine: VllmEngine, tmp_path: Path) -> None:
    """This one does not, by its own account; after that it is told that it does."""
    server, torch_engine = engine._server, TorchEngine(load_decoder(TINY_PATH), EOS, slots=1, context=CONTEXT)
    assert engine._call(server.client.options()).result() == {}
    assert (server.rounds, server.tempered) == ("", True)
    base = GenerateRequest("base", prompt(1), SamplingParams(max_tokens=2))
    adapted = replace(base, id="adapted", adapter="a0", adapter_folder=adapter(tmp_path, torch_engine, 0))
    server.rounds = "kv_cache_dtype = fp8"
    try:
        found = finish(engine, base, adapted)
    finally:
        server.rounds = ""
    assert found["base"].error is None
    error = found["adapted"].error
    assert error is not None
    assert error.elsewhere == "weights"
    assert "rounds what training does not: kv_cache_dtype = fp8" in error.message
