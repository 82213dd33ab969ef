"""The worker processes that the settings ask for: their configs and their environment."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from api.server.workers.nursery import Nursery
from api.server.workers.worker_process import start
from api.server.workers.worker_programs import embedded_workers, lone_worker, memory_of_workers, new_nursery
from scheduler.links.configs import Basics, GeneratorConfig, TorchConfig, TrainerBounds, TrainerConfig, VllmConfig
from store.load_settings import load_settings
from store.settings import SettingsError

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_the_embedded_workers_of_the_defaults(tmp_path: Path) -> None:
    settings = load_settings(None, data_dir=tmp_path)
    trainer, generator = embedded_workers(settings, {"a/b": Path("/models/b")})
    basics = Basics(
        str(tmp_path),
        {"a/b": "/models/b"},
        threads=settings.trainer.threads,
        base_dir="/dev/shm",
        blob_cache_bytes=settings.blob_cache_bytes,
    )
    assert trainer.command[3:] == ["workers", "trainer"]
    assert generator.command[3:] == ["workers", "generator"]
    assert trainer.environment["OMP_NUM_THREADS"] == str(settings.trainer.threads)
    assert trainer.config == TrainerConfig(replace(basics, role="trainer"), TrainerBounds(), "pages/trainer")
    assert generator.config == GeneratorConfig(replace(basics, role="generator"), engine=TorchConfig())
    assert trainer.forked
    assert generator.forked


def test_every_setting_of_a_worker_reaches_it(tmp_path: Path) -> None:
    config = tmp_path / "weft.toml"
    config.write_text(
        """
        durable = true
        base_dir = "/b"
        blob_cache_bytes = 21
        logs = { format = "json", level = "debug" }
        [trainer]
        replicas = 2
        threads = 3
        device = "cuda:1"
        dtype = "float32"
        microbatch_tokens = 11
        snapshot_every_tokens = 12
        resident_bytes = 13
        host_bytes = 14
        loss_limit_s = 2.5
        [generator]
        threads = 4
        device = "cpu"
        dtype = "bfloat16"
        slots = 15
        context_tokens = 16
        kv_tokens = 17
        prefill_tokens = 18
        adapter_cache_bytes = 19
        prefix_cache_bytes = 20
        packed = false
        lookup = 6
        """
    )
    settings, models = load_settings(config, data_dir=tmp_path), {"m": Path("/m")}
    trainer, second, generator = embedded_workers(settings, models)
    place = {
        "data_dir": str(tmp_path),
        "models": {"m": "/m"},
        "durable": True,
        "base_dir": "/b",
        "blob_cache_bytes": 21,
        "log_format": "json",
        "log_level": "debug",
    }
    training = Basics(**place, threads=3, device="cuda:1", dtype="float32", role="trainer")
    sampling = Basics(**place, threads=4, device="cpu", dtype="bfloat16", role="generator")
    bounds = TrainerBounds(11, 12, 13, 14, 2.5, trainers=2)
    assert trainer.config == TrainerConfig(training, bounds, "pages/trainer")
    assert second.config == TrainerConfig(replace(training, role="trainer-2"), bounds, "pages/trainer-2")
    assert (second.role, second.command[-1]) == ("trainer-2", "trainer")
    assert generator.config == GeneratorConfig(sampling, 15, 16, TorchConfig(17, 18, 19, 20, False, 6))
    ranks = "ranks = 2\n        nodes = 3\n        rendezvous = 'a:1'\n        shard = 'node'\n"
    config.write_text(config.read_text().replace('device = "cuda:1"', 'device = "cuda"\n        ' + ranks))
    with pytest.raises(SettingsError, match=r"trainer\.nodes: .* Redis"):
        embedded_workers(load_settings(config, data_dir=tmp_path), models)
    shared = load_settings(config, data_dir=tmp_path, redis_url="redis://r")
    of_many = lone_worker(shared, models, "trainer").config
    assert isinstance(of_many, TrainerConfig)
    assert (of_many.ranks, of_many.nodes, of_many.rendezvous, of_many.shard) == (2, 3, "a:1", "node")
    there = replace(sampling, redis_url="redis://r")
    assert lone_worker(shared, models, "generator").config == GeneratorConfig(
        there, 15, 16, TorchConfig(17, 18, 19, 20, False, 6)
    )


def test_generators_of_both_kinds(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.touch()
    config = tmp_path / "weft.toml"
    config.write_text(
        f"""
        [generator]
        replicas = ["torch", "vllm", "vllm"]
        [generator.vllm]
        program = "{program}"
        urls = ["http://10.0.0.7:8000"]
        max_rank = 32
        max_adapters = 3
        kv_bytes = 4
        """
    )
    settings = load_settings(config, data_dir=tmp_path)
    programs = embedded_workers(settings, {"m": Path("/models/m")})
    assert [program.role for program in programs] == ["trainer", "generator", "generator-2", "generator-3"]
    assert [program.command[-1] for program in programs] == ["trainer", "generator", "generator", "generator"]
    assert [program.forked for program in programs] == [True, True, False, False]
    engines = [program.config.engine for program in programs if isinstance(program.config, GeneratorConfig)]
    room = {"max_adapters": 3, "max_rank": 32, "kv_bytes": 4}
    assert engines == [
        TorchConfig(),
        VllmConfig(str(tmp_path / "vllm" / "generator-2"), url="http://10.0.0.7:8000", **room),
        VllmConfig(str(tmp_path / "vllm" / "generator-3"), program=str(program), gpus={"m": [0]}, **room),
    ]
    with pytest.raises(SettingsError, match="one base model"):
        embedded_workers(settings, {"m": Path("/m"), "n": Path("/n")})


def test_the_command_line_says_how_many_trainers(tmp_path: Path) -> None:
    config = tmp_path / "weft.toml"
    config.write_text("[trainer]\nthreads = 7\nreplicas = 2\n")
    assert load_settings(config, data_dir=tmp_path).trainer.replicas == 2
    told = load_settings(config, data_dir=tmp_path, trainers=3).trainer
    assert (told.replicas, told.threads) == (3, 7)
    with pytest.raises(SettingsError, match=r"trainer\.replicas"):
        load_settings(config, data_dir=tmp_path, trainers=0)


def test_the_command_line_names_the_kind_of_each_generator(tmp_path: Path) -> None:
    config = tmp_path / "weft.toml"
    config.write_text("[generator]\nslots = 7\n[generator.vllm]\nprogram = '/nonexistent'\n")
    settings = load_settings(config, data_dir=tmp_path, engine=("torch", "vllm"))
    assert (settings.generator.kinds, settings.generator.slots) == (["torch", "vllm"], 7)
    with pytest.raises(SettingsError, match="make vllm"):
        embedded_workers(settings, {"m": Path("/models/m")})


def tunables(environment: Mapping[str, str]) -> dict[str, str]:
    """Each allocator setting in a value, once."""
    pairs = [setting.split("=") for setting in environment["GLIBC_TUNABLES"].split(":")]
    assert len({name for name, _ in pairs}) == len(pairs)
    return {name: value for name, value in pairs}


@pytest.mark.skipif(not memory_of_workers(), reason="no glibc")
def test_workers_have_huge_pages_and_keep_their_memory_unless_the_operator_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {
        "glibc.malloc.hugetlb": "1",
        "glibc.malloc.mmap_threshold": str(32 << 20),
        "glibc.malloc.trim_threshold": str(128 << 20),
    }
    settings = load_settings(None, data_dir=tmp_path)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for program in embedded_workers(settings, {"m": Path("/m")}):
        assert tunables(program.environment) == ours
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0:glibc.malloc.arena_max=2")
    alone = lone_worker(settings, {"m": Path("/m")}, "trainer")
    assert tunables(alone.environment) == ours | {"glibc.malloc.hugetlb": "0", "glibc.malloc.arena_max": "2"}
    monkeypatch.setenv("GLIBC_TUNABLES", alone.environment["GLIBC_TUNABLES"])
    assert memory_of_workers()["GLIBC_TUNABLES"] == alone.environment["GLIBC_TUNABLES"]


def test_vllm_and_other_c_libraries_are_told_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(None, data_dir=tmp_path, engine=("vllm",))
    url = {"urls": ["http://10.0.0.7:8000"]}
    vllm = settings.generator.vllm.model_copy(update=url)
    settings = settings.model_copy(update={"generator": settings.generator.model_copy(update={"vllm": vllm})})
    trainer, generator = embedded_workers(settings, {"m": Path("/m")})
    assert "GLIBC_TUNABLES" not in generator.environment
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))  # musl before Python 3.13, macOS
    trainer = embedded_workers(settings, {"m": Path("/m")})[0]
    assert "GLIBC_TUNABLES" not in trainer.environment


def kernel_asks_programs() -> bool:
    """Whether the kernel gives huge pages to programs that ask for them."""
    return HUGE.is_file() and "[madvise]" in HUGE.read_text()


@pytest.mark.skipif(not (memory_of_workers() and kernel_asks_programs()), reason="no huge pages for those who ask")
def test_a_worker_has_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    program = embedded_workers(load_settings(None, data_dir=tmp_path), {"m": Path("/m")})[0]
    nursery = new_nursery()

    async def has(nursery: Nursery | None) -> None:
        """A worker that gets no messages: it waits, once it has imported everything."""
        worker = await start(dataclasses.replace(program, config=None), nursery)
        while not huge_kib(worker.pid):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        worker.signal(signal.SIGKILL)
        assert await worker.ended() == -signal.SIGKILL

    try:
        for starts in (None, nursery):
            asyncio.run(asyncio.wait_for(has(starts), 60))
    finally:
        nursery.close()


def huge_kib(pid: int) -> int:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["AnonHugePages"].split()[0])
