"""The worker processes that the settings ask for: how each is started, and its config.

All that an operator can set of a worker is in the settings, is checked there, and travels in the config over the link.
Only what must be there before the process runs is in its environment.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from api.server.workers.nursery import Nursery
from api.server.workers.vllm_places import gpus_of, options_of
from api.server.workers.worker_process import WorkerProgram
from scheduler.links.configs import (
    Basics,
    GeneratorConfig,
    TorchConfig,
    TrainerBounds,
    TrainerConfig,
    VllmConfig,
    WorkerConfig,
)
from store.settings import GeneratorSettings, Settings, SettingsError, TrainerSettings
from workers.model.planning.plan import LEAST_ADAPTER_BYTES, MOST_SLOTS
from workers.nursery import NURSERY

_ROOT = Path(__file__).resolve().parents[3]
#: -P: a folder named `workers` in the working directory must not be taken for our package.
_PROGRAM = (sys.executable, "-P", "-m", "workers")
#: Settings that glibc reads at a program's start: huge pages, if the kernel leaves that to programs; and the memory of
#: one pass is kept for the next, instead of being returned to the system (docs/performance.md, "Memory of the
#: workers").
_TUNABLES = {
    "glibc.malloc.hugetlb": "1",
    "glibc.malloc.mmap_threshold": str(32 << 20),
    "glibc.malloc.trim_threshold": str(128 << 20),
}


def new_nursery() -> Nursery:
    """The nursery of the embedded workers."""
    return Nursery([*_PROGRAM, NURSERY], _environment(threads=1) | memory_of_workers())


def embedded_workers(settings: Settings, models: Mapping[str, Path]) -> list[WorkerProgram]:
    """The trainers and the generators, on this machine, for these models. Raises SettingsError."""
    urls, trainers = _vllm_urls(settings, models), settings.trainer.replicas
    roles = [_numbered("trainer", number) for number in range(1, trainers + 1)]
    programs = [_program(role, _trainer(settings, models, trainers, f"pages/{role}")) for role in roles]
    here = count()
    for number, kind in enumerate(settings.generator.kinds, start=1):
        role = _numbered("generator", number)
        url = urls.pop(0) if urls and kind == "vllm" else ""
        folder = str(settings.data_dir / "vllm" / role)
        engine = _vllm(settings, models, url, folder, here) if kind == "vllm" else _torch(settings.generator)
        programs.append(_program(role, _generator(settings, models, engine)))
    return programs


def lone_worker(settings: Settings, models: Mapping[str, Path], role: str) -> WorkerProgram:
    """A trainer, or a generator of the first kind, that works for API replicas. Raises SettingsError."""
    if role == "trainer":
        return _program(role, _trainer(settings, models))
    kind, urls = settings.generator.kinds[0], _vllm_urls(settings, models)
    # The data folder is shared by many workers, so this one writes its adapters to a temporary folder.
    engine = _vllm(settings, models, "".join(urls[:1]), "", count()) if kind == "vllm" else _torch(settings.generator)
    return _program(role, _generator(settings, models, engine))


def _numbered(role: str, number: int) -> str:
    return role if number == 1 else f"{role}-{number}"


def _trainer(settings: Settings, models: Mapping[str, Path], trainers: int = 1, pages: str = "pages") -> TrainerConfig:
    """The config of one of `trainers` trainers on this machine."""
    trainer = settings.trainer
    bounds = TrainerBounds(
        microbatch_tokens=trainer.microbatch_tokens,
        snapshot_every_tokens=trainer.snapshot_every_tokens,
        resident_bytes=trainer.resident_bytes,
        host_bytes=trainer.host_bytes,
        loss_limit_s=trainer.loss_limit_s,
        trainers=trainers,
    )
    if trainer.nodes > 1 and not settings.redis_url:
        raise SettingsError("trainer.nodes: several machines come to a Redis (docs/production.md), and there is none")
    return TrainerConfig(
        _basics(settings, trainer, models),
        bounds,
        pages,
        ranks=trainer.ranks,
        nodes=trainer.nodes,
        rendezvous=trainer.rendezvous,
        shard=trainer.shard,
    )


def _generator(settings: Settings, models: Mapping[str, Path], engine: TorchConfig | VllmConfig) -> GeneratorConfig:
    generator = settings.generator
    return GeneratorConfig(
        _basics(settings, generator, models),
        slots=generator.slots or MOST_SLOTS["cpu"],
        context_tokens=generator.context_tokens,
        engine=engine,
    )


def _basics(settings: Settings, worker: TrainerSettings | GeneratorSettings, models: Mapping[str, Path]) -> Basics:
    return Basics(
        data_dir=str(settings.data_dir),
        models={name: str(path) for name, path in models.items()},
        threads=worker.threads,
        device=worker.device,
        dtype=worker.dtype,
        durable=settings.durable,
        redis_url=settings.redis_url,
        base_dir=settings.base_dir,
        blob_url=settings.blob_url,
        blob_cache_bytes=settings.blob_cache_bytes,
        log_format=settings.logs.format,
        log_level=settings.logs.level,
    )


def _torch(generator: GeneratorSettings) -> TorchConfig:
    return TorchConfig(
        kv_tokens=generator.kv_tokens,
        prefill_tokens=generator.prefill_tokens,
        adapter_bytes=generator.adapter_cache_bytes or LEAST_ADAPTER_BYTES,
        prefix_bytes=generator.prefix_cache_bytes,
        packed=bool(generator.packed),
        lookup=generator.lookup,
    )


def _vllm(settings: Settings, models: Mapping[str, Path], url: str, folder: str, here: Iterator[int]) -> VllmConfig:
    """`here` numbers the vLLMs that are started here."""
    vllm = settings.generator.vllm
    return VllmConfig(
        folder=folder,
        program="" if url else str(_vllm_program(settings)),
        url=url,
        max_adapters=vllm.max_adapters,
        max_rank=vllm.max_rank,
        kv_bytes=vllm.kv_bytes,
        options={} if url else options_of(settings),
        gpus={} if url else gpus_of(settings, list(models), next(here)),
        lossy_adapters=vllm.lossy_adapters,
    )


def _vllm_urls(settings: Settings, models: Mapping[str, Path]) -> list[str]:
    """The addresses of vLLM servers that run already."""
    urls = list(settings.generator.vllm.urls)
    if urls and len(models) > 1:
        raise SettingsError("generator.vllm.urls: a vLLM server has one base model, and this service has several")
    return urls


def _vllm_program(settings: Settings) -> Path:
    """The `vllm` command. Raises SettingsError if it is not installed."""
    program = settings.generator.vllm.program
    found = program.expanduser().absolute() if program.name else _ROOT / ".vllm" / "bin" / "vllm"
    if not found.is_file():
        raise SettingsError(f"there is no vLLM at {found}: run `make vllm`, or set [generator.vllm] program or urls")
    return found


def memory_of_workers() -> dict[str, str]:
    """The environment of a computing program: our glibc settings, unless the operator sets them. Empty without
    glibc."""
    if platform.libc_ver()[0] != "glibc":
        return {}
    own = [setting for setting in os.environ.get("GLIBC_TUNABLES", "").split(":") if setting]
    named = {setting.partition("=")[0] for setting in own}
    ours = [f"{name}={value}" for name, value in _TUNABLES.items() if name not in named]
    return {"GLIBC_TUNABLES": ":".join([*own, *ours])}


def _program(role: str, config: WorkerConfig) -> WorkerProgram:
    environment = _environment(config.basics.threads)
    vllm = isinstance(config, GeneratorConfig) and isinstance(config.engine, VllmConfig)
    if not vllm:  # vLLM inherits this environment, and manages its memory itself
        environment |= memory_of_workers()
    return WorkerProgram(
        role,
        [*_PROGRAM, role.partition("-")[0]],
        environment,
        replace(config, basics=replace(config.basics, role=role)),
        forked=not vllm,
    )


def _environment(threads: int) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
