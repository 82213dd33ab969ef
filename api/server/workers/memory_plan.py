"""The plan of memory (`workers.model.planning.plan`) for the workers that the settings ask for, on their devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from api.server.workers.vllm_places import taken_bytes, vllm_tables
from store.settings import Settings
from workers.model.base.files import stored_bytes
from workers.model.card import ModelCard
from workers.model.planning.check import check_model
from workers.model.planning.machine import UNKNOWN_BYTES, cuda_bytes, free_bytes
from workers.model.planning.plan import Device, Plan, Wanted, plan

#: For how many runs, of which rank, the table of memory at a start is made.
TENANTS, RANK = 16, 32


def planned(settings: Settings, cards: Mapping[str, ModelCard], alone: str = "") -> tuple[Settings, list[str]]:
    """Choose, for this machine, what the settings leave open; returns the settings and the tables of memory. They are
    for all workers, or only for one of the role `alone`, whose neighbours are not known. Raises DoesNotFit and
    SettingsError."""
    tables = vllm_tables(settings, cards, cuda_bytes() if settings.generator.device != "cpu" else [], alone)
    for device in devices_here(settings):
        trains, samples = _who(device, settings, alone)
        if device.size_bytes >= UNKNOWN_BYTES or not (trains or samples):
            continue
        found = plan_on(device, settings, cards, alone=alone)
        tables.append("\n".join(found.lines()))
        settings = _with(settings, found, trains, samples, alone)
    return settings, tables


def plan_on(
    device: Device,
    settings: Settings,
    cards: Mapping[str, ModelCard],
    *,
    tenants: int = TENANTS,
    rank: int = RANK,
    alone: str = "",
) -> Plan:
    """The plan for one device. Where the workers on it compute with different dtypes, all are planned with the wider.
    Raises DoesNotFit."""
    trainer, generator = settings.trainer, settings.generator
    trains, samples = _who(device, settings, alone)
    default = "float32" if device.kind == "cpu" else "bfloat16"
    asked = {trainer.dtype} if trains else set()
    asked |= {generator.dtype} if samples else set()
    dtypes = {default if dtype == "auto" else dtype for dtype in asked} or {default}
    models = [check_model(card, max(dtypes)) for card in cards.values()]
    known, ranks = _known(device), trainer.ranks if device.name == "cpu" else 1
    wanted = Wanted(
        trainers=ranks * (1 if alone else trainer.replicas) if trains else 0,
        ranks=ranks,
        owned=trainer.shard == "experts" and max(device.count, ranks) > 1,
        generators=generator.kinds.count("torch") if samples else 0,
        one_base=bool(settings.base_dir) and len(dtypes) == 1,
        spread=not known,
        slots=generator.slots,
        context_tokens=generator.context_tokens,
        kv_tokens=generator.kv_tokens,
        prefill_tokens=generator.prefill_tokens,
        adapter_cache_bytes=generator.adapter_cache_bytes,
        prefix_cache_bytes=generator.prefix_cache_bytes,
        packed=None if generator.packed == "auto" else generator.packed,
        resident_bytes=trainer.resident_bytes,
        microbatch_tokens=trainer.microbatch_tokens if "microbatch_tokens" in trainer.model_fields_set else 0,
        tenants=tenants,
        rank=rank,
        vllm_bytes=taken_bytes(device, settings, cards, alone) if known else 0,
    )
    return plan(models, device, wanted)


def devices_here(settings: Settings) -> list[Device]:
    """The devices of the trainer (the first of its ranks) and of the generators. A device that does not exist is left
    out: the workers will report it."""
    cuda = {f"cuda:{number}": size for number, size in enumerate(cuda_bytes())}
    found = []
    for name in dict.fromkeys(_place(worker.device, bool(cuda)) for worker in (settings.trainer, settings.generator)):
        if name == "cpu":
            # the memory of these files may be shared with the new workers, or is freed
            files = stored_bytes(Path(settings.base_dir)) if settings.base_dir else 0
            found.append(Device(name, free_bytes() + files))
        elif name in cuda:
            trainer = settings.trainer
            parts = trainer.ranks * (trainer.nodes if trainer.shard != "node" else 1)
            found.append(Device(name, cuda[name], parts))
    return found


def _who(device: Device, settings: Settings, alone: str) -> tuple[bool, bool]:
    """Two answers: whether the trainer is on the device, and whether generators are. A device of another machine is
    taken to have both."""
    here = [_place(worker.device, device.kind == "cuda") for worker in (settings.trainer, settings.generator)]
    trains, samples = (here[0] == device.name, here[1] == device.name) if _known(device) else (True, True)
    return trains and alone != "generator", samples and alone != "trainer"


def _known(device: Device) -> bool:
    """True if the device belongs to this machine."""
    return device.name == "cpu" or device.name.startswith("cuda:")


def _place(asked: str, cuda: bool) -> str:
    """The device's name, chosen as in `workers.model.device`."""
    name = ("cuda" if cuda else "cpu") if asked == "auto" else asked
    return "cuda:0" if name == "cuda" else name


def _with(settings: Settings, found: Plan, trains: bool, samples: bool, alone: str) -> Settings:
    """The settings with the plan's values. Unless the settings say otherwise, a pass takes as many tokens as all ranks
    compute at once, or twice as many as a single one does."""
    trainer, generator = settings.trainer, settings.generator
    if trains:
        tokens = {"microbatch_tokens": found.microbatch_tokens}
        if "pass_tokens" not in trainer.model_fields_set:
            steps = max(2, trainer.ranks * trainer.nodes)
            tokens["pass_tokens"] = max(trainer.pass_tokens, steps * found.microbatch_tokens)
        memory = {} if alone else {"resident_bytes": found.resident_bytes}
        trainer = trainer.model_copy(update=tokens | memory)
    if samples:
        chosen = {"slots": found.slots, "kv_tokens": found.kv_tokens, "packed": found.packed}
        chosen["adapter_cache_bytes"] = found.adapter_cache_bytes
        generator = generator.model_copy(update=chosen)
    return settings.model_copy(update={"trainer": trainer, "generator": generator})
