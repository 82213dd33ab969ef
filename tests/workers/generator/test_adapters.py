"""Adapters are read while others decode: who waits for a read and who does not, in which order reads take effect, and
what becomes of reads that fail, are no longer needed, or are cut off."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weft.wire.binary.sample_codec import PolicySpan

from tests.waiting import until
from workers.generator.adapters import AdapterCache, AdapterUnusable, HeldAdapter
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder

from .conftest import run, until_read
from .test_engine_contract import ask, same

LONG = SamplingParams(max_tokens=30, seed=3, stop_at_eos=False)


class SlowDisk:
    """Reads as the engine does, but each read waits until the test lets it go on."""

    def __init__(self, engine: TorchEngine) -> None:
        self._load, self._turns = engine._load, threading.Semaphore(0)
        self.begun: list[str] = []
        engine._adapters._load = self.read

    def read(self, folder: Path) -> tuple[Adapter, int]:
        self.begun.append(folder.name)
        assert self._turns.acquire(timeout=60)
        return self._load(folder)

    def let(self, reads: int) -> None:
        self._turns.release(reads)

    def until_begun(self, reads: int) -> None:
        until(lambda: len(self.begun) >= reads)


@pytest.fixture
def engine(decoder: Decoder) -> Iterator[TorchEngine]:
    engine = TorchEngine(decoder, (), slots=6, context=96)
    yield engine
    engine.close()


@pytest.fixture
def disk(engine: TorchEngine) -> Iterator[SlowDisk]:
    disk = SlowDisk(engine)
    yield disk
    disk.let(100)  # so that a failing test does not hang


@pytest.fixture(scope="module")
def versions(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {}
    for version in (1, 2, 3, 4):
        adapter = Adapter.init(AdapterShape(decoder.config, 4), seed=version, scale=2.0)
        adapter.flat.add_(torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(version)), alpha=0.05)
        folders[version] = tmp_path_factory.mktemp("policy") / f"v{version}"
        save_adapter(adapter, folders[version], base_model="tiny", details={"step": version})
    return folders


def follower(id: str, folder: Path, **fields: object) -> GenerateRequest:
    return ask(id, 5, LONG, adapter="mine", adapter_folder=folder, run="run", **fields)


def steps(engine: TorchEngine, count: int) -> dict[str, Finished]:
    return {finished.id: finished for _ in range(count) for finished in engine.step()}


def alone(decoder: Decoder, request: GenerateRequest) -> Finished:
    return run(TorchEngine(decoder, (), slots=6, context=96), request)[request.id]


def spans(finished: Finished) -> list[PolicySpan]:
    (sequence,) = finished.sequences
    return list(sequence.policy)


def test_others_go_on_while_one_waits_for_its_adapter(
    engine: TorchEngine, disk: SlowDisk, decoder: Decoder, adapters: dict[str, Path]
) -> None:
    waits = ask("waits", 7, LONG, adapter="a0", adapter_folder=adapters["a0"], num_samples=2)
    first, second = ask("first", 5, LONG), ask("second", 9, LONG)
    for request in (first, waits, second):  # the waiting request delays nobody, before it or after it
        engine.add(request)
    finished = steps(engine, 30)
    assert set(finished) == {"first", "second"}
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.adapters_loaded, engine.free_slots) == (0, 2, 0, 4)
    assert engine.busy
    disk.let(1)
    finished |= run(engine)
    for request in (first, waits, second):
        assert same(finished[request.id], alone(decoder, request))
    assert not engine.busy


def test_a_step_that_has_nothing_else_to_do_waits_for_the_read(
    engine: TorchEngine, disk: SlowDisk, adapters: dict[str, Path]
) -> None:
    """No busy loop: each such step pauses, and an adapter that arrives meanwhile is used at once."""
    engine.add(ask("r", 5, LONG, adapter="a0", adapter_folder=adapters["a0"]))
    began = time.monotonic()
    assert not steps(engine, 10)
    assert time.monotonic() - began > 0.04
    disk.let(1)
    until_read(engine)
    engine.step()
    assert engine.stats().running == 1


def test_requests_for_one_adapter_share_its_read(
    engine: TorchEngine, disk: SlowDisk, adapters: dict[str, Path]
) -> None:
    for i in range(3):
        engine.add(ask(f"r{i}", 5 + i, LONG, adapter="a0", adapter_folder=adapters["a0"]))
    disk.let(1)
    assert len(run(engine)) == 3
    assert disk.begun == ["a0"]


def test_old_weights_serve_until_the_new_ones_are_read(
    engine: TorchEngine, disk: SlowDisk, versions: dict[int, Path]
) -> None:
    disk.let(1)
    engine.add(follower("runs", versions[1]))
    until_read(engine)
    steps(engine, 4)
    engine.swap_adapter("mine", versions[2])
    engine.add(follower("new", versions[2]))
    steps(engine, 6)
    disk.let(1)
    until_read(engine)
    finished = run(engine)
    assert spans(finished["runs"]) == [PolicySpan(1, 11), PolicySpan(2, 19)]
    assert spans(finished["new"]) == [PolicySpan(2, 30)]  # it was added after the swap: it never sees the old weights


def test_swaps_of_one_name_keep_their_order_and_the_last_wins(
    engine: TorchEngine, disk: SlowDisk, versions: dict[int, Path]
) -> None:
    disk.let(1)
    engine.add(follower("runs", versions[1]))
    until_read(engine)
    steps(engine, 4)
    engine.swap_adapter("mine", versions[2])
    disk.until_begun(2)
    engine.add(follower("second", versions[2]))
    engine.swap_adapter("mine", versions[3])
    engine.swap_adapter("mine", versions[4])  # 3 has not begun: nobody needs it any more
    disk.let(1)
    engine._adapters.wait(60)
    steps(engine, 5)  # 2 is in, 4 is not
    disk.let(1)
    until_read(engine)
    finished = run(engine, follower("last", versions[1]))
    assert spans(finished["runs"]) == [PolicySpan(1, 5), PolicySpan(2, 5), PolicySpan(4, 20)]
    assert spans(finished["second"])[0].version == 2
    assert spans(finished["last"]) == [PolicySpan(4, 30)]
    assert disk.begun == ["v1", "v2", "v4"]


def test_a_damaged_file_fails_those_that_wait_for_it_and_nobody_else(
    engine: TorchEngine, disk: SlowDisk, decoder: Decoder, versions: dict[int, Path], tmp_path: Path
) -> None:
    disk.let(1)
    before = follower("before", versions[1])
    engine.add(before)
    until_read(engine)
    steps(engine, 3)
    engine.swap_adapter("mine", tmp_path)
    engine.add(follower("with it", tmp_path))
    engine.add(ask("other", 5, LONG, adapter="damaged", adapter_folder=tmp_path))
    steps(engine, 3)
    disk.let(2)
    until_read(engine)
    finished = run(engine)
    assert same(finished["before"], alone(decoder, before))
    for id, name in (("with it", "mine"), ("other", "damaged")):
        error = finished[id].error
        assert error is not None
        assert error.message == f"the sampler weights {name!r} are damaged or of another base model"
        assert error.category == "user"
    disk.let(1)
    assert run(engine, follower("later", versions[2]))["later"].error is None  # it brings a folder of its own
    assert engine.stats().adapters_loaded == 1


def test_a_disk_that_breaks_is_the_servers_fault(
    engine: TorchEngine, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(folder: Path) -> tuple[Adapter, int]:
        raise OSError(f"cannot read {folder}")

    monkeypatch.setattr(engine._adapters, "_load", breaks)
    error = run(engine, ask("r", adapter="a0", adapter_folder=adapters["a0"]))["r"].error
    assert error is not None
    assert error.category == "server"
    assert str(adapters["a0"]) not in error.message


def test_cancel_while_it_is_read(
    engine: TorchEngine, disk: SlowDisk, decoder: Decoder, adapters: dict[str, Path]
) -> None:
    request = ask("r", 5, LONG, adapter="a0", adapter_folder=adapters["a0"])
    for id in ("gone", "r"):
        engine.add(replace(request, id=id))
    disk.until_begun(1)
    cancelled = engine.cancel("gone")
    assert cancelled is not None
    assert [len(sequence.tokens) for sequence in cancelled.sequences] == [0]
    assert (cancelled.facts.prefill, cancelled.facts.sample) == (0, 0)
    assert engine.stats().waiting == 1
    disk.let(1)
    finished = run(engine)
    assert set(finished) == {"r"}
    assert same(finished["r"], alone(decoder, request))


def test_the_only_request_is_cancelled_while_its_adapter_is_read(
    engine: TorchEngine, disk: SlowDisk, adapters: dict[str, Path]
) -> None:
    engine.add(ask("r", 5, LONG, adapter="a0", adapter_folder=adapters["a0"]))
    disk.until_begun(1)
    engine.cancel("r")
    assert engine.free_slots == 6
    disk.let(1)
    assert run(engine) == {}
    assert engine.stats().adapters_loaded == 1  # for the next one
    assert run(engine, ask("again", 5, LONG, adapter="a0", adapter_folder=adapters["a0"]))["again"].error is None
    assert disk.begun == ["a0"]


def test_staleness_is_judged_by_the_weights_that_a_request_waits_for(
    engine: TorchEngine, disk: SlowDisk, versions: dict[int, Path]
) -> None:
    """Each request's run moves on while its adapter is being read, or while it has no room yet and newer weights, for
    which it waits, are on their way."""
    engine.add(follower("fresh", versions[2], max_staleness=1))
    engine.add(follower("stale", versions[2], max_staleness=0))
    engine.run_moved("run", 3)
    assert not steps(engine, 3)
    disk.let(1)
    until_read(engine)
    (stale,) = steps(engine, 1).values()
    assert stale.id == "stale"
    assert stale.sequences[0].stale
    engine.add(follower("strict", versions[2], max_staleness=1))  # its weights are there, but it has not begun
    engine.swap_adapter("mine", versions[4])
    engine.run_moved("run", 4)
    finished = steps(engine, 3)
    assert finished["fresh"].sequences[0].stale
    disk.let(1)
    until_read(engine)
    finished |= run(engine)
    assert spans(finished["strict"]) == [PolicySpan(4, 30)]
    assert not finished["strict"].sequences[0].stale


def test_close_ends_the_thread(engine: TorchEngine, disk: SlowDisk, adapters: dict[str, Path]) -> None:
    for name, folder in adapters.items():
        engine.add(ask(name, 5, LONG, adapter=name, adapter_folder=folder))
    disk.until_begun(1)
    disk.let(1)
    engine.close()
    assert len(disk.begun) <= 2  # what had begun ends; the others never begin
    assert not [thread for thread in threading.enumerate() if thread in engine._adapters._thread._threads]


# -- the cache alone


@pytest.fixture
def cache(decoder: Decoder, tmp_path: Path) -> Iterator[AdapterCache]:
    """A cache with room for two adapters."""
    shape = AdapterShape(decoder.config, 2, True, False, False)
    size = 4 * shape.numel
    cache = AdapterCache(lambda folder: (Adapter.init(shape, seed=0), 3), lambda folder: size, max_bytes=2 * size)
    for name in "abc":
        (tmp_path / name).mkdir()
    yield cache
    cache.close()


def read(cache: AdapterCache, name: str, folder: Path | None, *keep: HeldAdapter) -> HeldAdapter:
    """Acquire, read and install."""
    held = cache.acquire(name, folder)
    while held.coming:
        if held.needs_bytes is None:
            cache.try_to_read(held)
        else:
            cache.begin(held, keep)
        assert cache.reading
        cache.wait(60)
        installed = cache.install()
        assert installed is not None
        if installed[1] is not None:
            cache.release(held)
            raise installed[1]
    assert not cache.reading
    return held


def test_adapters_are_evicted_least_recently_used_and_never_in_use(cache: AdapterCache, tmp_path: Path) -> None:
    held = read(cache, "a", tmp_path / "a")
    cache.release(read(cache, "b", tmp_path / "b"))
    cache.release(read(cache, "c", tmp_path / "c", held))  # b goes: a is older but in use
    assert len(cache) == 2
    cache.release(read(cache, "a", None))
    cache.release(read(cache, "c", None))
    with pytest.raises(AdapterUnusable, match="'b' are gone"):
        read(cache, "b", None)
    cache.release(held)
    cache.release(read(cache, "b", tmp_path / "b"))
    assert (len(cache), held.version) == (2, 3)


def test_who_waits_with_an_adapter_that_makes_room_has_it_read_again(cache: AdapterCache, tmp_path: Path) -> None:
    held = read(cache, "a", tmp_path / "a")
    before = held.weights
    cache.release(read(cache, "b", tmp_path / "b"))
    cache.release(read(cache, "c", tmp_path / "c"))
    read(cache, "b", tmp_path / "b", held)
    read(cache, "c", tmp_path / "c")  # a waits, b is kept by nobody either: the older one goes
    assert (held.weights, held.coming, held.source, len(cache)) == (0, True, tmp_path / "a", 2)
    assert read(cache, "a", None) is held
    assert held.weights > before


def test_newer_weights_that_nobody_holds_are_read_when_somebody_does(cache: AdapterCache, tmp_path: Path) -> None:
    cache.release(read(cache, "a", tmp_path / "a"))
    cache.swap("a", tmp_path / "b")
    assert (len(cache), cache.size_bytes) == (0, 0)
    assert read(cache, "a", tmp_path / "a").source == tmp_path / "b"


def test_a_process_that_may_have_no_more_threads_does_not_serve(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did serve, and the first read, which starts the thread, counted as begun: its adapter never came."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="new thread"):
        TorchEngine(decoder, (), slots=6, context=96)


def test_what_cannot_begin_to_be_read_fails_its_request_and_is_read_for_the_next(
    engine: TorchEngine, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed but was kept as well, so that the engine was never idle again, and later requests waited for ever."""

    def refused(*_: object) -> None:
        raise RuntimeError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(engine._adapters._thread, "submit", refused)
        engine.add(ask("a", 5, LONG, adapter="a0", adapter_folder=adapters["a0"]))
    assert [finished.id for finished in engine.step()] == ["a"]
    assert not engine.busy
    done = run(engine, ask("b", 5, LONG, adapter="a0", adapter_folder=adapters["a0"]))
    assert len(done["b"].sequences[0].tokens) == 30
