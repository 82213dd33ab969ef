"""How to divide GPUs between trainers and generators for one model and its tenants: every division that fits, played.

How fast a GPU is for the model is arithmetic (rooflines), not measured: `weftd simulate --model`. Training takes six
operations for each active parameter and token, as long as the layers are gathered beside it; a decode step reads all
weights and the keys and values of its sequences, a prompt takes two operations for each active parameter and token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Result, Simulation
from scheduler.simulator.workloads import Workload

#: Tokens of a sequence that is decoded, on average.
KEPT_TOKENS = 4096
#: Divisions that are played at most: of more, those that differ most.
MOST = 16


@dataclass(frozen=True)
class Gpu:
    """What is had in practice of an H100 or H200 (docs/production.md): operations and bytes per second, the bytes that
    its neighbours send it, and what an hour of it costs."""

    operations_per_s: float = 400e12
    bytes_per_s: float = 3.0e12
    received_bytes_per_s: float = 350e9
    hour_usd: float = 1.59


@dataclass(frozen=True)
class Shape:
    """Of a model: `layer_bytes` are gathered twice in a pass, `end_bytes` (embedding and head) once. `ranks`: GPUs of
    one trainer, and `gpus`: of one generator, that it needs at least."""

    layer_bytes: int
    end_bytes: int
    active_parameters: int
    kv_bytes_per_token: int
    ranks: int
    gpus: int


@dataclass(frozen=True)
class Division:
    cluster: Cluster
    result: Result

    @property
    def trained_per_s(self) -> float:
        return self.result.trained_tokens / self.result.seconds


def gather_s(shape: Shape, ranks: int, gpu: Gpu) -> float:
    """The layers that one rank receives in a pass that is one step: of all but its own part."""
    return (2 * shape.layer_bytes + shape.end_bytes) * (ranks - 1) / ranks / gpu.received_bytes_per_s


def cluster_of(shape: Shape, gpu: Gpu, *, trainers: int, ranks: int, replicas: int, slots: int) -> Cluster:
    weights, many = shape.layer_bytes + shape.end_bytes, shape.gpus
    operations_s = shape.active_parameters / gpu.operations_per_s / many
    decode_s = weights / gpu.bytes_per_s / many
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
        trained_tokens_per_s_per_gpu=gpu.operations_per_s / (6 * shape.active_parameters),
        gather_s=gather_s(shape, ranks, gpu),
        pass_tokens=65_536,
        gpu_hour_usd=gpu.hour_usd,
    )


def candidates(shape: Shape, gpus: int, tenants: int) -> list[tuple[int, int, int]]:
    """(trainers, ranks of each, replicas) that use the GPUs, as far as they can be used; a trainer without a run is of
    no use."""
    found = []
    ranks = shape.ranks
    while ranks <= gpus - shape.gpus:
        for trainers in range(1, min(tenants, (gpus - shape.gpus) // ranks) + 1):
            found.append((trainers, ranks, (gpus - trainers * ranks) // shape.gpus))
        ranks *= 2
    step = max(1, -(-len(found) // MOST))
    return sorted(found, key=lambda one: (one[0] * one[1], one))[::step]


def divisions(
    shape: Shape, gpu: Gpu, gpus: int, loads: Sequence[Workload], *, slots: int, hours: float, seed: int = 0
) -> Iterator[Division]:
    for trainers, ranks, replicas in candidates(shape, gpus, len(loads)):
        cluster = cluster_of(shape, gpu, trainers=trainers, ranks=ranks, replicas=replicas, slots=slots)
        yield Division(cluster, Simulation(cluster, loads, seed=seed).run(hours * 3600))


def best(found: Sequence[Division]) -> Division:
    """The one that trains most tokens; of those within a hundredth, the one with fewer GPUs."""
    most = max(one.trained_per_s for one in found)
    return min((one for one in found if one.trained_per_s >= 0.99 * most), key=lambda one: one.cluster.gpus)


def table(found: Sequence[Division], gpus: int) -> str:
    heads = ["trainers x ranks", "generators x GPUs", "idle", "slots busy", "trainers busy", "trained/s", "$/Mtok"]
    chosen = best(found)
    lines = [[*heads, ""]] + [
        [
            f"{one.cluster.trainers} x {one.cluster.ranks}",
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
