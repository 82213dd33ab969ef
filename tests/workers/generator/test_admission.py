"""Which adapters are in memory when not all fit: never more than the limit, whoever asks, and nobody waits for ever."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Lock

import pytest
import torch

from tests.search import chance, examples
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder

from .conftest import run, until_read
from .test_engine_contract import ask, same

#: Adapters of each tenant.
NUMBER = 10


@pytest.fixture(scope="module")
def shape(decoder: Decoder) -> AdapterShape:
    return AdapterShape(decoder.config, 2)


@pytest.fixture(scope="module")
def small(shape: AdapterShape, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of two tenants, all of one size."""
    return {f"{tenant}{i}": made(shape, f"{tenant}{i}", tmp_path_factory) for tenant in "ab" for i in range(NUMBER)}


@pytest.fixture(scope="module")
def large(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of more than twice that size."""
    return made(AdapterShape(decoder.config, 6), "large", tmp_path_factory)


def made(shape: AdapterShape, name: str, folders: pytest.TempPathFactory) -> Path:
    adapter = Adapter.init(shape, seed=0, scale=2.0)
    noise = torch.Generator().manual_seed(sum(name.encode()))
    adapter.flat.add_(torch.randn(adapter.flat.shape, generator=noise), alpha=0.05)
    folder = folders.mktemp("adapters") / name
    save_adapter(adapter, folder, base_model="tiny")
    return folder


class Watched:
    """An engine with room for `adapters` of a size; the real size of its adapters is counted whenever one is read."""

    def __init__(self, decoder: Decoder, shape: AdapterShape, adapters: float, **options: int) -> None:
        self.size = 4 * shape.numel
        self.cap = int(adapters * self.size)
        self.engine = TorchEngine(decoder, (), **{"slots": 32, "context": 96, "adapter_bytes": self.cap, **options})
        self.read: list[str] = []
        self.most = 0
        self._there: dict[int, int] = {}
        self._lock = Lock()
        self._load = self.engine._adapters._load
        self.engine._adapters._load = self._read

    def _read(self, folder: Path) -> tuple[Adapter, int]:
        loaded = self._load(folder)
        adapter, key, size = loaded[0], id(loaded[0]), loaded[0].flat.nbytes
        with self._lock:
            self.read.append(folder.name)
            self._there[key] = size
            self.most = max(self.most, sum(self._there.values()))
        weakref.finalize(adapter, self._there.pop, key)
        return loaded

    def until(self, *ids: str) -> dict[str, Finished]:
        """Step until these have ended."""
        found: dict[str, Finished] = {}
        for _ in range(5000):
            if found.keys() >= set(ids):
                return found
            found |= {finished.id: finished for finished in self.engine.step()}
        raise AssertionError(f"{set(ids) - found.keys()} do not end")

    @property
    def running(self) -> set[str]:
        return {id for id, progress in self.engine._open.here.items() if progress.started}


def of(name: str, folder: Path, tokens: int = 12, **fields: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, seed=5, stop_at_eos=False)
    return ask(name, 5 + len(name), sampling, tenant=name[0], **{"adapter": name, "adapter_folder": folder, **fields})


Alone = Callable[[GenerateRequest], Finished]


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> Iterator[Alone]:
    """The result of a request in an engine with room for all, with nobody beside it."""
    engine = TorchEngine(decoder, (), slots=32, context=96)
    yield lambda request: run(engine, request)[request.id]
    engine.close()


def test_ten_adapters_are_served_at_once_where_two_fit(
    decoder: Decoder, shape: AdapterShape, small: dict[str, Path], alone: Alone
) -> None:
    watched = Watched(decoder, shape, 2)
    requests = [of(f"a{i}", small[f"a{i}"], num_samples=2) for i in range(10)]
    finished = run(watched.engine, *requests)
    for request in requests:
        assert same(finished[request.id], alone(request))
    assert watched.read == [f"a{i}" for i in range(10)]
    assert watched.most == watched.cap == watched.engine.stats().adapter_bytes


def test_one_that_is_larger_than_all_there_is_comes_in_alone(
    decoder: Decoder, shape: AdapterShape, small: dict[str, Path], large: Path, alone: Alone
) -> None:
    """It is not kept afterwards."""
    watched = Watched(decoder, shape, 2)
    requests = [of("a0", small["a0"]), of("a1", small["a1"]), of("large", large), of("b0", small["b0"]), ask("base")]
    for request in requests:
        watched.engine.add(request)
    finished = watched.until("large")
    assert "b0" not in finished
    finished |= run(watched.engine)
    for request in requests[:-1]:
        assert same(finished[request.id], alone(request))
    assert watched.read[:2] == ["a0", "large"]
    assert sorted(watched.read[2:]) == ["a1", "b0"]
    assert watched.most < 2 * watched.cap
    assert watched.engine.stats().adapter_bytes <= watched.cap


def test_a_stream_of_small_ones_does_not_keep_a_large_one_waiting(
    decoder: Decoder, shape: AdapterShape, small: dict[str, Path], large: Path
) -> None:
    """Nor by those that need nothing new: in the end their adapters are released for the large one."""
    watched = Watched(decoder, shape, 4)
    for i in range(4):
        watched.engine.add(of(f"a{i}", small[f"a{i}"]))
    until_read(watched.engine)
    watched.engine.add(of("large", large))
    ended = list[str]()
    for i in range(200):
        number = i % 6
        id = f"again {i}"
        watched.engine.add(replace(of(f"a{number}", small[f"a{number}"]), id=id))
        ended += [finished.id for finished in watched.engine.step()]
        if "large" in ended:
            break
    else:
        raise AssertionError("it waits still")
    assert len(ended) < 40
    assert len(run(watched.engine)) + len(ended) == 4 + 1 + i + 1
    assert watched.most <= watched.cap


def test_who_needs_nothing_new_goes_on(decoder: Decoder, shape: AdapterShape, small: dict[str, Path]) -> None:
    """While a tenant's ten adapters wait for room, its own oldest one is emptied, and nobody else's."""
    watched = Watched(decoder, shape, 3)
    watched.engine.add(of("b0", small["b0"], 80))
    for i in range(10):
        watched.engine.add(of(f"a{i}", small[f"a{i}"], 40))
    until_read(watched.engine)
    watched.engine.step()
    assert watched.running == {"b0", "a0", "a1"}
    assert watched.engine.free_slots >= 20  # those that wait for room delay nobody
    watched.engine.add(replace(of("b0", small["b0"]), id="b again"))
    watched.engine.add(replace(of("a1", small["a1"]), id="a1 again"))
    watched.engine.add(replace(of("a0", small["a0"]), id="a0 again"))
    watched.engine.add(ask("base"))
    watched.engine.step()
    assert watched.running == {"b0", "a0", "a1", "b again", "a1 again", "base"}
    assert len(run(watched.engine)) == 15
    assert watched.read.index("a2") > watched.read.index("a1")


def test_the_next_is_whoever_has_had_least(decoder: Decoder, shape: AdapterShape, small: dict[str, Path]) -> None:
    """A tenant's tenth adapter is not before another tenant's first, though that came later."""
    watched = Watched(decoder, shape, 2)
    for i in range(10):
        watched.engine.add(of(f"a{i}", small[f"a{i}"]))
    until_read(watched.engine)
    watched.engine.step()
    watched.engine.add(of("b0", small["b0"]))
    watched.engine.add(of("b1", small["b1"]))
    run(watched.engine)
    assert [set(watched.read[at : at + 2]) for at in (0, 2, 4)] == [{"a0", "a1"}, {"a2", "b0"}, {"a3", "b1"}]
    assert watched.read[6:] == [f"a{i}" for i in range(4, 10)]


def test_a_higher_priority_is_first(decoder: Decoder, shape: AdapterShape, small: dict[str, Path]) -> None:
    watched = Watched(decoder, shape, 1)
    for i in range(3):
        watched.engine.add(of(f"a{i}", small[f"a{i}"]))
    watched.engine.add(of("a9", small["a9"], priority=1))
    run(watched.engine)
    assert watched.read == ["a0", "a9", "a1", "a2"]


def test_a_higher_priority_is_no_reason_to_keep_another_tenant_waiting(
    decoder: Decoder, shape: AdapterShape, small: dict[str, Path]
) -> None:
    watched = Watched(decoder, shape, 1)
    for i in range(4):
        watched.engine.add(of(f"a{i}", small[f"a{i}"], priority=1))
    watched.engine.add(of("b0", small["b0"]))
    run(watched.engine)
    assert watched.read == ["a0", "b0", "a1", "a2", "a3"]


def test_newer_weights_of_one_in_use_wait_for_nobody(
    decoder: Decoder, shape: AdapterShape, small: dict[str, Path]
) -> None:
    """They are read beside the older ones, one adapter at a time, though nothing else fits."""
    watched = Watched(decoder, shape, 2)
    for name in ("a0", "b0", "a1"):
        watched.engine.add(of(name, small[name], 60))
    until_read(watched.engine)
    watched.engine.step()
    for name in ("a0", "b0"):
        watched.engine.swap_adapter(name, small["b9"])
    until_read(watched.engine)
    assert watched.read == ["a0", "b0", "b9", "b9"]
    assert watched.running == {"a0", "b0"}
    assert watched.most == 3 * watched.size
    assert len(run(watched.engine)) == 3
    assert watched.most == 3 * watched.size


@pytest.mark.parametrize("seed", range(examples(2)))
def test_random_crowds(
    decoder: Decoder, shape: AdapterShape, small: dict[str, Path], large: Path, tmp_path: Path, alone: Alone, seed: int
) -> None:
    """With cancellations, damaged files, swaps of used and unused adapters, and few pages: all requests end, each with
    the bits that it gets alone, within the memory limit."""
    draw = chance(seed)
    swaps = draw.random() < 0.5
    watched = Watched(
        decoder, shape, draw.choice([0.5, 1, 2, 3.5]), slots=draw.choice([2, 5, 32]), kv_tokens=draw.choice([96, 400])
    )
    engine, free = watched.engine, watched.engine.free_slots
    open, finished = dict[str, GenerateRequest](), list[tuple[GenerateRequest, Finished]]()

    def add(number: int) -> None:
        name = draw.choice([*small, "large", "damaged", "", "b0", "b0"])
        folder = {**small, "large": large, "damaged": tmp_path, "": None}[name]
        fields = {"num_samples": draw.randint(1, 3), "priority": draw.choice([0, 0, 1])}
        request = replace(of(name or "x", folder, draw.randint(1, 20), **fields), id=f"r{number}", adapter=name)
        open[request.id] = request
        engine.add(request)

    for number in range(40):
        add(number)
        if swaps and draw.random() < 0.2:
            name = draw.choice(["b0", "a0", "a1"])
            engine.swap_adapter(name, draw.choice([small[name], small[name], tmp_path]))
        if draw.random() < 0.1 and engine.cancel(gone := draw.choice([*open])) is not None:
            del open[gone]
        for _ in range(draw.choice([0, 0, 1, 3])):
            finished += [(open.pop(end.id), end) for end in engine.step()]
    finished += [(open.pop(end.id), end) for end in run(engine, max_steps=5000).values()]
    assert not open
    known: dict[GenerateRequest, Finished] = {}
    for request, end in finished:
        if request.adapter == "damaged":
            assert end.error is not None
            continue
        if end.error is not None:  # it waited for newer weights
            assert swaps
            assert request.adapter in ("a0", "a1", "b0")
            continue
        plain = replace(request, id="alone", priority=0)
        assert same(end, known.setdefault(plain, alone(plain)))
    biggest = 4 * AdapterShape(decoder.config, 6).numel
    assert watched.most <= max(watched.cap, biggest) + (watched.size if swaps else 0)
    assert engine.stats().adapter_bytes <= watched.cap
    assert not any(held.users for held in engine._adapters._here.values())
    assert engine.free_slots == free
