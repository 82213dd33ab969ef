"""How to divide GPUs between trainers and generators for one model and its tenants: every division that fits, played.

How fast a GPU is for the model is arithmetic (rooflines), not measured: `weftd simulate --model`. Training takes six
operations for each active parameter and token (forward, again for the backward, gradient of the input), and those of
attention; a decode step reads all weights and the keys and values of its sequences, a prompt takes two operations for
each active parameter and token. Ranks have the base in one of two layouts, `[trainer] shard` (docs/production.md, "How
large a pass"): "all" gathers layers while it computes; with "experts" tokens travel, and nothing is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Result, Simulation
from scheduler.simulator.workloads import Workload

#: The mean number of tokens of a sequence that is being decoded.
KEPT_TOKENS = 4096
#: How many divisions are played at most; of more, those that differ most.
MOST = 16


@dataclass(frozen=True)
class Gpu:
    """The speed that an H100 or H200 reaches in practice (docs/production.md): operations and bytes per second, the
    bytes per second that it receives from its neighbours, and the price of an hour."""

    operations_per_s: float = 400e12
    bytes_per_s: float = 3.0e12
    received_bytes_per_s: float = 350e9
    hour_usd: float = 1.59


@dataclass(frozen=True)
class Owned:
    """A mixture whose `experts` are owned by ranks, at least `ranks` of them. `active` are the active parameters that
    belong to experts. In a pass `token_bytes` travel for a token to its experts and back, if all of them are on other
    ranks; and `adapter_bytes` for the experts' factors of a run."""

    experts: int
    ranks: int
    active: int
    token_bytes: int
    adapter_bytes: int


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. Each gathering in a pass moves `gathered_bytes` of its `weight_bytes`. Training takes
    `pair_operations` for each pair of tokens of one sequence (its length squared). `ranks` and `gpus`: how many GPUs
    one trainer, and one generator, need at least. `owned`: set if ranks may own its experts."""

    weight_bytes: int
    gathered_bytes: int
    active_parameters: int
    kv_bytes_per_token: int
    ranks: int
    gpus: int
    pair_operations: int = 0
    owned: Owned | None = None


@dataclass(frozen=True)
class Division:
    """A division of the GPUs, and what it achieved. `shard` is as in the settings; "" for one rank."""

    cluster: Cluster
    shard: str
    result: Result

    @property
    def trained_per_s(self) -> float:
        return self.result.trained_tokens / self.result.seconds


def gather_s(shape: Shape, ranks: int, gpu: Gpu) -> float:
    """How long a rank receives layers in a pass that is one step: all parts but its own."""
    return shape.gathered_bytes * (ranks - 1) / ranks / gpu.received_bytes_per_s


def cluster_of(
    shape: Shape,
    gpu: Gpu,
    *,
    trainers: int,
    ranks: int,
    replicas: int,
    slots: int,
    owned: Owned | None = None,
    busiest: float = 1.0,
) -> Cluster:
    """The cluster with these counts. With `owned` the ranks own the experts: the `busiest` owner has that many times
    the average work, and the others wait for it."""
    many = shape.gpus
    operations_s = shape.active_parameters / gpu.operations_per_s / many
    decode_s = shape.weight_bytes / gpu.bytes_per_s / many
    away = (ranks - 1) / ranks / ranks / gpu.received_bytes_per_s  # seconds of one rank per byte that travels
    waited_for = owned.active * (busiest - 1) if owned else 0
    each_s = shape.kv_bytes_per_token * KEPT_TOKENS / gpu.bytes_per_s / many + 2 * operations_s
    return Cluster(
        replicas=replicas,
        gpus_per_replica=many,
        slots=slots,
        decode_s=decode_s,
        decode_s_per_sequence=each_s,
        prefill_speed=(decode_s + slots * each_s) / (2 * operations_s),
        trainers=trainers,
        ranks=ranks,
        trained_tokens_per_s_per_gpu=gpu.operations_per_s / (6 * (shape.active_parameters + waited_for)),
        pair_s=shape.pair_operations / gpu.operations_per_s,
        gather_s=0.0 if owned else gather_s(shape, ranks, gpu),
        travel_s=owned.token_bytes * busiest * away if owned else 0.0,
        adapter_s=owned.adapter_bytes * away if owned else 0.0,
        pass_tokens=65_536,
        gpu_hour_usd=gpu.hour_usd,
    )


def candidates(shape: Shape, gpus: int, tenants: int) -> list[tuple[int, int, int]]:
    """(trainers, ranks of each, replicas) that use as many of the GPUs as possible. There are never more trainers than
    tenants, since a trainer without a run does nothing."""
    found = []
    ranks = shape.ranks
    while ranks <= gpus - shape.gpus:
        for trainers in range(1, min(tenants, (gpus - shape.gpus) // ranks) + 1):
            found.append((trainers, ranks, (gpus - trainers * ranks) // shape.gpus))
        ranks *= 2
    step = max(1, -(-len(found) // MOST))
    return sorted(found, key=lambda one: (one[0] * one[1], one))[::step]


def layouts(shape: Shape, ranks: int) -> dict[str, Owned | None]:
    """The layouts in which that many ranks can keep the base, by the name of the setting."""
    owned = shape.owned
    if ranks == 1:
        return {"": None}
    fits = owned is not None and ranks >= owned.ranks and owned.experts % ranks == 0
    return {"all": None, "experts": owned} if fits else {"all": None}


def divisions(
    shape: Shape,
    gpu: Gpu,
    gpus: int,
    loads: Sequence[Workload],
    *,
    slots: int,
    hours: float,
    seed: int = 0,
    busiest: float = 1.0,
) -> Iterator[Division]:
    for trainers, ranks, replicas in candidates(shape, gpus, len(loads)):
        counts = {"trainers": trainers, "ranks": ranks, "replicas": replicas, "slots": slots}
        for shard, owned in layouts(shape, ranks).items():
            cluster = cluster_of(shape, gpu, **counts, owned=owned, busiest=busiest)
            yield Division(cluster, shard, Simulation(cluster, loads, seed=seed).run(hours * 3600))


def faster_below_tokens(shape: Shape, gpu: Gpu, ranks: int, runs: int, busiest: float = 1.0) -> float:
    """The number of tokens in a pass below which owners of experts are faster than ranks that gather; the pass is one
    step with that many runs. Above it a pass no longer waits for gathering. Attention is not counted."""
    counts = {"trainers": 1, "ranks": ranks, "replicas": 1, "slots": 1}
    owners = cluster_of(shape, gpu, **counts, owned=shape.owned, busiest=busiest)
    each_s = 1 / owners.trained_tokens_per_s_per_gpu / ranks + owners.travel_s
    return max(0.0, gather_s(shape, ranks, gpu) - runs * owners.adapter_s) / each_s


def best(found: Sequence[Division]) -> Division:
    """The division that trains most tokens; among those within a hundredth of it, the one with fewer GPUs, then the
    default layout."""
    most = max(one.trained_per_s for one in found)
    return min((one for one in found if one.trained_per_s >= 0.99 * most), key=lambda one: one.cluster.gpus)


def table(found: Sequence[Division], gpus: int) -> str:
    heads = [
        "trainers x ranks",
        "shard",
        "generators x GPUs",
        "idle",
        "slots busy",
        "trainers busy",
        "trained/s",
        "$/Mtok",
    ]
    chosen = best(found)
    lines = [[*heads, ""]] + [
        [
            f"{one.cluster.trainers} x {one.cluster.ranks}",
            one.shard,
            f"{one.cluster.replicas} x {one.cluster.gpus_per_replica}",
            f"{gpus - one.cluster.gpus}",
            f"{one.result.utilisation:.0%}",
            f"{1 - one.result.trainer_wait:.0%}",
            f"{one.trained_per_s:,.0f}",
            f"{one.result.usd_per_mtok:.2f}",
            "best" if one is chosen else "",
        ]
        for one in found
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
