"""What serving models takes of the memory that computes, and the settings that follow from it; arithmetic alone.

The server plans before it starts a worker, `weftd plan` for machines that are not there. Settings that say 0 are
chosen, others are held to: what cannot fit is refused by the name of its setting, before anything is allocated. In
order, memory goes to what must be there (weights, libraries, what is computed at once), the caches, keys and values,
and the runs in training; a tenth is left alone, for what allocators lose. What vLLM takes is
known before (`vllm_plan`).

All figures are bytes of one device, or of the host where the CPU computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.model.adapters.shape import AdapterShape
from workers.model.planning.check import ITEM_BYTES, TRAINING_BYTES, Check, experts_numel, kept_bytes, unequal
from workers.model.planning.layer_groups import layer_groups

#: The share of memory that is left alone.
SPARE = 0.1
#: How much one of our processes takes with torch imported; and on a CUDA device, with its context and libraries.
PROCESS_BYTES = {"cpu": 320 << 20, "cuda": 768 << 20}
#: How much the processes beside the workers take on a CPU: the server, and the nursery.
SERVER_BYTES, NURSERY_BYTES = 256 << 20, 160 << 20
#: The most tokens that are chosen to be trained at once: beyond some 2k a CPU gets slower, a GPU has then as much to do
#: as its launches take. A GPU that has not an eighth of its memory for them takes fewer.
MOST_TRAINED, LEAST_TRAINED = {"cpu": 2048, "cuda": 8192}, 2048
#: The most slots that the plan chooses: with more, a step takes longer for all in it.
MOST_SLOTS = {"cpu": 32, "cuda": 64}
#: Slots are chosen for sequences of this length; the youngest make way when they all grow longer.
USUAL_TOKENS = 1024
#: Memory for adapters that are sampled from, for each model in each generator, if there is room.
LEAST_ADAPTER_BYTES = 2 << 30
ADAPTERS = "adapters in use"
#: Positions of a page of the cache.
PAGE_TOKENS = 32
#: Rows of logits that the trainer has at a time, and how many copies.
LOGIT_ROWS, LOGIT_COPIES = 1024, 3
#: Logits (rows x vocabulary) that a generator on a GPU has at a time while it scores a prompt, and the bytes of each:
#: them and their log-probabilities, the tempered ones, and what is drawn from in float64.
SCORED_LOGITS, SCORE_BYTES = 1 << 25, 28


class DoesNotFit(ValueError):
    """The model does not fit. The message names the setting, its size, the memory, and a way out."""


@dataclass(frozen=True)
class Device:
    """A place to compute: `count` equal devices, each with `size_bytes` of memory to use."""

    name: str
    size_bytes: int
    count: int = 1

    @property
    def kind(self) -> str:
        return "cpu" if self.name == "cpu" else "cuda"


@dataclass(frozen=True)
class Wanted:
    """Settings of these names (`store.settings`), 0 if the plan chooses; and who is on the device. `packed` None: as
    memory allows. `trainers` are processes, of which `ranks` are one trainer. `one_base`: workers share one copy,
    ranks on a CPU too, which else have a part each: with `owned` a share of the experts, and all of the rest. `spread`:
    a base that no device holds whole may be spread for sampling. `tenants` runs of `rank` are what is planned for.
    `vllm_bytes` are vLLM's, and not to be had."""

    trainers: int = 1
    ranks: int = 1
    owned: bool = False
    generators: int = 1
    one_base: bool = False
    spread: bool = False
    slots: int = 0
    context_tokens: int = 8192
    kv_tokens: int = 0
    prefill_tokens: int = 2048
    adapter_cache_bytes: int = 0
    prefix_cache_bytes: int = 512 << 20
    packed: bool | None = None
    resident_bytes: int = 0
    microbatch_tokens: int = 0
    tenants: int = 16
    rank: int = 32
    vllm_bytes: int = 0


@dataclass(frozen=True)
class Part:
    name: str
    size_bytes: int
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """`parts` in memory, and what is `paged` out of it. The rest is what the settings should say, of a trainer and of a
    generator where they are planned."""

    device: Device
    parts: list[Part]
    paged: Part
    slots: int
    kv_tokens: int
    adapter_cache_bytes: int
    resident_bytes: int
    microbatch_tokens: int
    packed: bool
    trains: bool
    samples: bool

    @property
    def used_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def lines(self) -> list[str]:
        """A table for people."""
        rows = [*self.parts, Part("left alone", self.device.size_bytes - self.used_bytes)]
        of = f"{self.device.count} x {self.device.name}" if self.device.count > 1 else self.device.name
        shown = [f"{part.name:<32}{gib(part.size_bytes):>12}  {part.note}".rstrip() for part in rows]
        generator = [
            f"generator.slots = {self.slots}",
            f"generator.kv_tokens = {self.kv_tokens}",
            f"generator.adapter_cache_bytes = {self.adapter_cache_bytes}",
            *([f"generator.packed = {str(self.packed).lower()}"] if self.device.kind == "cpu" else []),
        ]
        trainer = [
            f"{self.paged.name:<32}{gib(self.paged.size_bytes):>12}  {self.paged.note}".rstrip(),
            f"trainer.microbatch_tokens = {self.microbatch_tokens}",
            f"trainer.resident_bytes = {self.resident_bytes}",
        ]
        return [
            f"{f'{of}, each' if self.device.count > 1 else of:<32}{gib(self.device.size_bytes):>12}",
            *shown,
            *(trainer if self.trains else []),
            *(generator if self.samples else []),
        ]


def plan(models: Sequence[Check], device: Device, wanted: Wanted) -> Plan:
    """Raises DoesNotFit."""
    room = _Room(device)
    room.take("vLLM", wanted.vllm_bytes, must="generator.vllm", way_out="see [generator.vllm] in docs/vllm.md")
    spread = _weights(models, device, wanted, room)
    alone = wanted.trainers if device.count == 1 else 0
    shares = wanted.one_base and not spread and wanted.generators + alone > 0
    _processes(device, wanted, room, len(models) if shares else 0)
    tokens = _computed(models, wanted, room)
    packed = _packing(models, device, wanted, room)
    more = _caches(models, device, wanted, room)
    slots, kv_tokens = _keys_and_values(models, device, wanted, room, spread, more)
    resident, paged = _runs(models, device, wanted, room)
    adapters = _adapters(models, wanted, room)
    who = wanted.trainers > 0, wanted.generators > 0
    return Plan(device, room.parts, paged, slots, kv_tokens, adapters, resident, tokens, packed, *who)


class _Room:
    """The memory taken so far. Required parts may take everything that the device has; chosen parts leave SPARE of it
    free."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.parts: list[Part] = []
        self._must_bytes = 0

    @property
    def free_bytes(self) -> int:
        """The bytes left for chosen parts."""
        return max(0, int(self.device.size_bytes * (1 - SPARE)) - sum(part.size_bytes for part in self.parts))

    @property
    def unused_bytes(self) -> int:
        """The bytes that no part takes, SPARE included."""
        return max(0, self.device.size_bytes - sum(part.size_bytes for part in self.parts))

    @property
    def left_bytes(self) -> int:
        """The bytes left for required parts, whatever chosen parts take."""
        return self.device.size_bytes - self._must_bytes

    def take(self, name: str, size_bytes: int, note: str = "", *, must: str = "", way_out: str = "") -> None:
        """Take memory for a part. `must`: the setting that requires it, in words."""
        if must and size_bytes > self.left_bytes:
            there = f"{self.device.name} has {gib(self.device.size_bytes)}, of which {gib(self._must_bytes)} are taken"
            raise DoesNotFit(f"{must} takes {gib(size_bytes)} for {name}; {there}: {way_out}")
        self._must_bytes += size_bytes if must else 0
        if size_bytes:
            self.parts.append(Part(name, size_bytes, note))


def _weights(models: Sequence[Check], device: Device, wanted: Wanted, room: _Room) -> bool:
    """Take memory for the weights. Returns whether the generators, too, hold parts of a base that no device could hold
    whole."""
    whole = sum(model.weight_bytes for model in models)
    must, way_out = f"models: {', '.join(model.card.name for model in models)}", "more devices, or fewer models"
    if wanted.one_base and not (wanted.ranks > 1 and wanted.owned) and device.count == 1:
        workers = wanted.trainers + wanted.generators
        note = f"one copy for {workers} workers"
        room.take("weights", whole if workers else 0, note, must=must, way_out=way_out)
        return False
    if wanted.trainers:
        each, note = _of_owners(models, device, wanted) if wanted.owned else _of_parts(models, device)
        replicas = -(-wanted.trainers // wanted.ranks)
        room.take("weights of the trainer", replicas * each, note, must=must, way_out=way_out)
    copies = min(1, wanted.generators) if wanted.one_base else wanted.generators
    spread = wanted.spread and device.count > 1 and whole * copies > room.left_bytes * (1 - 2 * SPARE)
    note = f"a part of {device.count}: only vLLM does that" if spread else ""
    size = -(-whole // device.count) if spread else whole * copies
    room.take("weights of the generator", size, note, must=must, way_out=way_out)
    return spread


def _of_parts(models: Sequence[Check], device: Device) -> tuple[int, str]:
    """A trainer's weights on one device, or in parts over several."""
    whole = sum(model.weight_bytes for model in models)
    if device.count == 1:
        return whole, ""
    gathered = max(map(_gathered_bytes, models))
    return -(-whole // device.count) + gathered, f"a part of {device.count}, and what is gathered of it"


def _of_owners(models: Sequence[Check], device: Device, wanted: Wanted) -> tuple[int, str]:
    """The weights of a trainer whose ranks own the experts, one rank on each device or all on the host."""
    ranks, size = max(device.count, wanted.ranks), 0
    for model in models:
        if problem := unequal(model.card.config, ranks):
            raise DoesNotFit(f'trainer.shard = "experts" and {model.card.name}: {problem}: set "all", or other ranks')
        experts = ITEM_BYTES[model.dtype] * experts_numel(model.card.config)
        size += experts // device.count + (model.weight_bytes - experts) * (ranks // device.count)
    return size, f"one of {ranks} shares of the experts, and the rest" if device.count > 1 else f"of {ranks} ranks"


def _gathered_bytes(model: Check) -> int:
    """The bytes of a base in parts that a device has whole at a time: two layers, the embedding and the head."""
    config = model.card.config
    ends = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
    return ITEM_BYTES[model.dtype] * (ends + 2 * (model.parameters - ends) // config.num_layers)


def _processes(device: Device, wanted: Wanted, room: _Room, shared: int) -> None:
    """On a CUDA device a process holds the weights of each model that is `shared`."""
    workers = wanted.trainers + wanted.generators
    size = workers * PROCESS_BYTES[device.kind]
    size += shared * PROCESS_BYTES["cuda"] if device.kind == "cuda" else SERVER_BYTES + NURSERY_BYTES
    must, way_out = f"trainer.replicas and generator.replicas ({workers} workers)", "set less"
    room.take("processes and libraries", size, must=must, way_out=way_out)


def _computed(models: Sequence[Check], wanted: Wanted, room: _Room) -> int:
    """The largest model's, for one is computed at a time. The trainer keeps everything of a forward where that takes a
    small part of the memory; else the layers' inputs, with the inside of one layer (`memory.py`). Returns how many
    tokens are trained at once."""
    configs, part = [model.card.config for model in models], room.free_bytes // 8

    def inputs(tokens: int) -> int:
        return max(tokens * (c.num_layers * c.hidden_size * 4 + 2 * kept_bytes(c)) for c in configs)

    trained = wanted.microbatch_tokens or MOST_TRAINED[room.device.kind]
    while not wanted.microbatch_tokens and trained > LEAST_TRAINED and inputs(trained) * wanted.trainers > part:
        trained //= 2
    if wanted.trainers:
        logits = max(LOGIT_COPIES * LOGIT_ROWS * c.vocab_size * 4 for c in configs)
        all_of_it = max(2 * trained * c.num_layers * kept_bytes(c) for c in configs)
        kept = all_of_it <= part // wanted.trainers
        note = f"{trained:,} tokens, {'kept' if kept else 'layers computed again'}"
        must, way_out = f"trainer.microbatch_tokens = {trained:,}", "set less, at least the longest sequence"
        travel = max(map(_travelling_bytes, models)) * trained if wanted.owned else 0
        size = wanted.trainers * ((all_of_it if kept else inputs(trained)) + logits + travel)
        room.take("activations of the trainer", size, note, must=must, way_out=way_out)
    if wanted.generators:
        tokens = wanted.prefill_tokens
        scores = SCORED_LOGITS * SCORE_BYTES if room.device.kind == "cuda" else 0
        size = wanted.generators * (max(tokens * kept_bytes(c) for c in configs) + scores)
        must = f"generator.prefill_tokens = {tokens:,}"
        room.take("activations of the generator", size, f"{tokens:,} tokens", must=must, way_out="set less")
    return trained


def _travelling_bytes(model: Check) -> int:
    """Bytes for one token on its way to the owners of its experts and back, if the owners have equal work: at both ends
    the sent and the received numbers, and the owner's rows of them."""
    config = model.card.config
    return 6 * config.experts_per_token * config.expert_size * ITEM_BYTES[model.dtype]


def _packing(models: Sequence[Check], device: Device, wanted: Wanted, room: _Room) -> bool:
    """A second copy of the weights in each generator on a CPU, where they are float32."""
    if device.kind != "cpu" or not wanted.generators or any(model.dtype != "float32" for model in models):
        return bool(wanted.packed)
    size = wanted.generators * sum(4 * _multiplied(model) for model in models)
    if wanted.packed is False or (wanted.packed is None and size > room.free_bytes // 2):
        return False
    must = "generator.packed = true" if wanted.packed else ""
    room.take("packed weights of the generator", size, must=must, way_out="set it to false")
    return True


def _multiplied(model: Check) -> int:
    """Parameters that rows are multiplied with; a table of embeddings is not, unless it is the head, too."""
    config = model.card.config
    return model.parameters - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)


def _caches(models: Sequence[Check], device: Device, wanted: Wanted, room: _Room) -> int:
    """Returns what was chosen for adapters beyond the least."""
    each = wanted.generators * len(models)
    if device.kind == "cuda":
        prompts, way_out = each * wanted.prefix_cache_bytes, "set less, or 0"
        must = f"generator.prefix_cache_bytes = {wanted.prefix_cache_bytes:,}"
        room.take("prompts that are kept", prompts, must=must, way_out=way_out)
    else:
        room.take("prompts that are kept", min(each * wanted.prefix_cache_bytes, room.free_bytes // 8))
    asked = wanted.adapter_cache_bytes
    must, way_out = f"generator.adapter_cache_bytes = {asked:,}", "set less, or 0, and the server chooses"
    size = each * asked if asked else room.free_bytes // 8 if each else 0
    room.take(ADAPTERS, size, must=must if asked else "", way_out=way_out)
    return 0 if asked else max(0, size - each * LEAST_ADAPTER_BYTES)


def _keys_and_values(
    models: Sequence[Check], device: Device, wanted: Wanted, room: _Room, spread: bool, adapters: int
) -> tuple[int, int]:
    """Slots and tokens of each model in each generator. Half of what is left at most is chosen for them, less what
    `adapters` took beyond the least: the other half is for runs."""
    if not wanted.generators:
        return wanted.slots or MOST_SLOTS[device.kind], wanted.kv_tokens
    parts = device.count if spread else 1
    each = -(-wanted.generators * sum(_bytes_per_token(model) for model in models) // parts)
    longest = max(min(wanted.context_tokens, model.card.context_length) for model in models)
    least = -(-longest // PAGE_TOKENS) * PAGE_TOKENS
    most = max(0, int(room.left_bytes * (1 - SPARE)) // each)
    if least > most:
        way_out = f"at most {most:,} tokens fit; set less"
        room.take("keys and values", least * each, must=f"generator.context_tokens = {longest:,}", way_out=way_out)
    slots, state = wanted.slots or MOST_SLOTS[device.kind], wanted.generators * sum(m.state_bytes for m in models)
    if state and not wanted.slots:
        slots = max(1, min(slots, room.free_bytes // 4 // state))
    room.take("states of sequences", slots * state, must=f"generator.slots = {slots}", way_out="set less")
    full = slots * (least + PAGE_TOKENS)
    fits = max(0, room.free_bytes - adapters) // 2 // each if wanted.trainers else room.free_bytes // each
    kv_tokens = wanted.kv_tokens or max(least, min(full, fits) // PAGE_TOKENS * PAGE_TOKENS)
    if not wanted.slots:
        slots = max(1, min(slots, kv_tokens // min(USUAL_TOKENS, longest)))
    note = f"{kv_tokens:,} tokens of {each:,} bytes, {slots} sequences"
    must = f"generator.kv_tokens = {kv_tokens:,}"
    room.take("keys and values", kv_tokens * each, note, must=must, way_out=f"at most {most:,} tokens fit")
    return slots, kv_tokens


def _bytes_per_token(model: Check) -> int:
    """Routes are recorded beside keys and values; pages of every group of layers have room for them."""
    config = model.card.config
    groups = len(layer_groups(config, model.card.context_length))
    return model.kv_bytes_per_token + groups * 2 * len(config.mixture_layers) * config.experts_per_token


def _adapters(models: Sequence[Check], wanted: Wanted, room: _Room) -> int:
    """The bytes that each model in each generator has for adapters. If the plan chooses, and they would be few, half of
    what is left over is added. An adapter of the planned rank always fits."""
    each = max(1, wanted.generators * len(models))
    largest = max(4 * AdapterShape(model.card.config, wanted.rank).numel for model in models)
    size = sum(part.size_bytes for part in room.parts if part.name == ADAPTERS)
    if wanted.generators and not wanted.adapter_cache_bytes:
        size = max(size, min(each * max(LEAST_ADAPTER_BYTES, largest), size + room.unused_bytes // 2))
    if size:
        count = size // largest
        rest = f", {gib(largest)} each" + ("" if count else "; the first is let in all the same")
        note = f"of the generator: {count:,} of rank {wanted.rank}{rest}"
        room.parts[:] = [part for part in room.parts if part.name != ADAPTERS] + [Part(ADAPTERS, size, note)]
    return wanted.adapter_cache_bytes or max(size // each, largest)


def _runs(models: Sequence[Check], device: Device, wanted: Wanted, room: _Room) -> tuple[int, Part]:
    """Memory for the states of runs, and what is paged of those that are planned for: of the largest model, all of it
    trained."""
    each = max(TRAINING_BYTES * AdapterShape(model.card.config, wanted.rank).numel for model in models)
    if not wanted.trainers:
        return wanted.resident_bytes, Part("runs paged out", 0)
    chosen = (room.free_bytes if device.kind == "cuda" else room.free_bytes // 2) // wanted.trainers
    resident = wanted.resident_bytes or max(chosen, min(each, room.unused_bytes // wanted.trainers))
    note = f"{resident // each:,} of rank {wanted.rank}, {gib(each)} each"
    must = f"trainer.resident_bytes = {resident:,}" if wanted.resident_bytes else ""
    way_out = f"at most {room.left_bytes:,} fit; or set 0, and the server chooses"
    room.take("runs in training", wanted.trainers * resident, note, must=must, way_out=way_out)
    there = min(wanted.tenants, wanted.trainers * (resident // each))
    where = "to the host's memory, then to the disk" if device.kind == "cuda" else "to the disk"
    return resident, Part("runs paged out", (wanted.tenants - there) * each, f"of {wanted.tenants}, {where}")


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"
